// Used by all kernels: storage types, and vectors with explicit lanes and order of summation.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

namespace {

struct bf16 {
    uint16_t bits;
};

inline float widen(bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline float widen(float x) { return x; }
inline double widen(double x) { return x; }

template <class T, class A>
inline T narrow(A x) {
    if constexpr (std::is_same_v<T, bf16>) {
        uint32_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
        return bf16{static_cast<uint16_t>(x != x ? 0x7fc0 : rounded)};
    } else {
        return x;
    }
}

template <class T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

// exp in a form that compilers vectorise: 2^n times a polynomial (Cephes), within 2 units in the last place.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float n = std::nearbyint(x * 1.44269504f);
    const float r = std::fma(n, 2.12194440e-4f, std::fma(n, -0.693359375f, x));  // ln 2 in two parts
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const int32_t bits = (static_cast<int32_t>(x == x ? n : 0.0f) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
}
inline double exponential(double x) { return std::exp(x); }

constexpr int64_t SERIAL = 1 << 14;  // elements: below, starting threads costs more than it gains

#ifdef __AVX512F__
constexpr int REGISTER = 64;  // bytes
#else
constexpr int REGISTER = 32;
#endif

template <class A, int BYTES = 64>
using Vector __attribute__((vector_size(BYTES))) = A;
template <class A>
constexpr int64_t LANES = 64 / sizeof(A);

template <class A>
inline int64_t whole_vectors(int64_t size) {
    return (size + LANES<A> - 1) / LANES<A> * LANES<A>;
}

template <class A, int BYTES = 64>
inline Vector<A, BYTES> load(const A* from) {
    Vector<A, BYTES> x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

// Returns the sum of both halves.
template <class A, int BYTES>
inline Vector<A, BYTES / 2> fold(Vector<A, BYTES> x) {
    Vector<A, BYTES / 2> halves[2];
    std::memcpy(halves, &x, sizeof x);
    return halves[0] + halves[1];
}

// Folds to 16 bytes.
template <class A, int BYTES>
inline Vector<A, 16> fold_all(Vector<A, BYTES> x) {
    if constexpr (BYTES == 16)
        return x;
    else
        return fold_all<A, BYTES / 2>(fold<A, BYTES>(x));
}

template <class A, int BYTES = 64>
inline A total(Vector<A, BYTES> x) {
    const Vector<A, 16> part = fold_all<A, BYTES>(x);
    if constexpr (sizeof(A) == 4)
        return (part[0] + part[2]) + (part[1] + part[3]);
    else
        return part[0] + part[1];
}

// Whether one instruction adds the products of two neighbouring elements to one lane.
#ifdef __AVX512BF16__
template <class T>
constexpr bool PAIRS = std::is_same_v<T, bf16>;
#else
template <class T>
constexpr bool PAIRS = false;
#endif

template <class T, int BYTES = 64>
inline Vector<Wide<T>, BYTES> load_wide(const T* from) {
    if constexpr (std::is_same_v<T, bf16>) {
        Vector<uint16_t, BYTES / 2> bits;
        std::memcpy(&bits, from, sizeof bits);
        return (Vector<float, BYTES>)(__builtin_convertvector(bits, Vector<uint32_t, BYTES>) << 16);
    } else {
        return load<T, BYTES>(from);
    }
}

// Returns x * y + z, rounded once: left to itself, the compiler fuses these in some copies of a loop and not in others.
template <class A>
inline Vector<A, REGISTER> multiply_add(Vector<A, REGISTER> x, Vector<A, REGISTER> y, Vector<A, REGISTER> z) {
    [[maybe_unused]] constexpr bool is_float = std::is_same_v<A, float>;
#if defined(__AVX512F__)
    if constexpr (is_float) return (Vector<A>)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
    else return (Vector<A>)_mm512_fmadd_pd((__m512d)x, (__m512d)y, (__m512d)z);
#elif defined(__FMA__)
    if constexpr (is_float) return (Vector<A, 32>)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
    else return (Vector<A, 32>)_mm256_fmadd_pd((__m256d)x, (__m256d)y, (__m256d)z);
#else
    for (int64_t lane = 0; lane < int64_t(REGISTER / sizeof(A)); lane++) z[lane] = std::fma(x[lane], y[lane], z[lane]);
    return z;
#endif
}

// Adds to each lane the products of its elements: one from each of x and y, or two.
template <class T, int BYTES = 64>
inline void add_products(Vector<Wide<T>, BYTES>& sums, const T* x, const T* y) {
#ifdef __AVX512BF16__
    if constexpr (PAIRS<T>) {
        static_assert(BYTES == 64);
        const __m512bh a = (__m512bh)_mm512_loadu_si512(x), b = (__m512bh)_mm512_loadu_si512(y);
        sums = (Vector<float>)_mm512_dpbf16_ps((__m512)sums, a, b);
        return;
    }
#endif
    if constexpr (BYTES == REGISTER)
        sums = multiply_add<Wide<T>>(load_wide<T, BYTES>(x), load_wide<T, BYTES>(y), sums);
    else
        sums += load_wide<T, BYTES>(x) * load_wide<T, BYTES>(y);
}

template <class T, int BYTES = 64>
constexpr int64_t STEP = (PAIRS<T> ? 2 : 1) * BYTES / sizeof(Wide<T>);  // elements that `add_products` takes

#if defined(__has_builtin)
#define HAS(WHAT) __has_builtin(WHAT)
#else
#define HAS(WHAT) 0
#endif

// Writes the totals of four vectors, with the same bits as `total`.
template <class A, int BYTES = 64>
inline void four_totals(Vector<A, BYTES> a, Vector<A, BYTES> b, Vector<A, BYTES> c, Vector<A, BYTES> d, A* to) {
#if HAS(__builtin_shufflevector)  // of GCC from version 12 on
    if constexpr (sizeof(A) == 4) {
        using Quarter = Vector<A, 16>;
        const Quarter w = fold_all<A, BYTES>(a), x = fold_all<A, BYTES>(b), y = fold_all<A, BYTES>(c),
                      z = fold_all<A, BYTES>(d);
        const Quarter wx = __builtin_shufflevector(w, x, 0, 4, 1, 5) + __builtin_shufflevector(w, x, 2, 6, 3, 7);
        const Quarter yz = __builtin_shufflevector(y, z, 0, 4, 1, 5) + __builtin_shufflevector(y, z, 2, 6, 3, 7);
        const Quarter all =
            __builtin_shufflevector(wx, yz, 0, 1, 4, 5) + __builtin_shufflevector(wx, yz, 2, 3, 6, 7);
        std::memcpy(to, &all, sizeof all);
        return;
    }
#endif
    to[0] = total<A, BYTES>(a), to[1] = total<A, BYTES>(b), to[2] = total<A, BYTES>(c), to[3] = total<A, BYTES>(d);
}

// Widens `size` elements and appends zeros up to `padded`.
template <class T>
inline void widen_row(const T* from, int64_t size, int64_t padded, Wide<T>* to) {
#pragma omp simd
    for (int64_t i = 0; i < size; i++) to[i] = widen(from[i]);
    for (int64_t i = size; i < padded; i++) to[i] = 0;
}

}  // namespace
