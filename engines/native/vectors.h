// Used by all kernels: storage types, and vectors with explicit lanes and order of summation.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __AVX512BF16__
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

template <class A, int BYTES = 64>
using Vector __attribute__((vector_size(BYTES))) = A;
template <class A>
constexpr int64_t LANES = 64 / sizeof(A);

template <class A>
inline int64_t whole_vectors(int64_t size) {
    return (size + LANES<A> - 1) / LANES<A> * LANES<A>;
}

template <class A>
inline Vector<A> load(const A* from) {
    Vector<A> x;
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

template <class A>
inline A total(Vector<A> x) {
    const Vector<A, 16> part = fold<A, 32>(fold<A, 64>(x));
    if constexpr (sizeof(A) == 4)
        return (part[0] + part[2]) + (part[1] + part[3]);
    else
        return part[0] + part[1];
}

// Whether one instruction adds the products of two neighbouring elements to one lane.
#ifdef __AVX512BF16__
template <class T>
constexpr bool PAIRS = std::is_same_v<T, bf16>;

inline void add_products(Vector<float>& sums, const bf16* x, const bf16* y) {
    const __m512bh a = (__m512bh)_mm512_loadu_si512(x), b = (__m512bh)_mm512_loadu_si512(y);
    sums = (Vector<float>)_mm512_dpbf16_ps((__m512)sums, a, b);
}
#else
template <class T>
constexpr bool PAIRS = false;
#endif

inline Vector<float> load_wide(const bf16* from) {
    Vector<uint16_t, 32> bits;
    std::memcpy(&bits, from, sizeof bits);
    return (Vector<float>)(__builtin_convertvector(bits, Vector<uint32_t>) << 16);
}
inline Vector<float> load_wide(const float* from) { return load(from); }
inline Vector<double> load_wide(const double* from) { return load(from); }

// Adds to each lane the products of its elements: one from each of x and y, or two.
template <class T>
inline void add_products(Vector<Wide<T>>& sums, const T* x, const T* y) {
    sums += load_wide(x) * load_wide(y);
}

template <class T>
constexpr int64_t STEP = (PAIRS<T> ? 2 : 1) * LANES<Wide<T>>;  // elements that `add_products` takes

#if defined(__has_builtin)
#define HAS(WHAT) __has_builtin(WHAT)
#else
#define HAS(WHAT) 0
#endif

// Writes the totals of four vectors, with the same bits as `total`.
template <class A>
inline void four_totals(Vector<A> a, Vector<A> b, Vector<A> c, Vector<A> d, A* to) {
#if HAS(__builtin_shufflevector)  // of GCC from version 12 on
    if constexpr (sizeof(A) == 4) {
        using Quarter = Vector<A, 16>;
        const Quarter w = fold<A, 32>(fold<A, 64>(a)), x = fold<A, 32>(fold<A, 64>(b)),
                      y = fold<A, 32>(fold<A, 64>(c)), z = fold<A, 32>(fold<A, 64>(d));
        const Quarter wx = __builtin_shufflevector(w, x, 0, 4, 1, 5) + __builtin_shufflevector(w, x, 2, 6, 3, 7);
        const Quarter yz = __builtin_shufflevector(y, z, 0, 4, 1, 5) + __builtin_shufflevector(y, z, 2, 6, 3, 7);
        const Quarter all =
            __builtin_shufflevector(wx, yz, 0, 1, 4, 5) + __builtin_shufflevector(wx, yz, 2, 3, 6, 7);
        std::memcpy(to, &all, sizeof all);
        return;
    }
#endif
    to[0] = total<A>(a), to[1] = total<A>(b), to[2] = total<A>(c), to[3] = total<A>(d);
}

// Widens `size` elements and appends zeros up to `padded`.
template <class T>
inline void widen_row(const T* from, int64_t size, int64_t padded, Wide<T>* to) {
#pragma omp simd
    for (int64_t i = 0; i < size; i++) to[i] = widen(from[i]);
    for (int64_t i = size; i < padded; i++) to[i] = 0;
}

}  // namespace
