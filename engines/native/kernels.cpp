// On a CPU: the decoder's small operations, each in one pass over its data, products of few rows, attention over the
// paged cache, and the draw. Twins, with the shapes and the meaning, are in engines/models/operations.py and
// projection.py, engines/attention/sdpa.py and engines/sampling/sampler.py. They round to the storage type T where the twins do,
// and compute in A = max(float, T). What is done for a row depends on nothing but the row: the same bits in any batch
// and with any number of threads. So sums are vectors whose lanes and order are written out: left to the compiler, two
// copies of a loop may sum in two orders.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

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

// The sum of both halves.
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

// Whether two neighbours' products are added to one lane by one instruction.
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

// To each lane the products of its elements: one of each row, or two.
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

// The totals of four, the bits of `total`.
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

// `size` elements, wide, and zeros to whole vectors.
template <class T>
inline void widen_row(const T* from, int64_t size, int64_t padded, Wide<T>* to) {
#pragma omp simd
    for (int64_t i = 0; i < size; i++) to[i] = widen(from[i]);
    for (int64_t i = size; i < padded; i++) to[i] = 0;
}

template <class T>
inline void norm_row(const T* x, const T* weight, T* out, int64_t size, double eps) {
    using A = Wide<T>;
    Vector<A> sums = {};
    for (int64_t first = 0; first < size; first += LANES<A>) {
        A part[LANES<A>];
        if (first + LANES<A> <= size)
            widen_row<T>(x + first, LANES<A>, LANES<A>, part);
        else
            widen_row<T>(x + first, size - first, LANES<A>, part);
        const Vector<A> values = load(part);
        sums += values * values;
    }
    const A scale = A(1) / std::sqrt(total<A>(sums) / A(size) + A(eps));
#pragma omp simd
    for (int64_t i = 0; i < size; i++)
        out[i] = narrow<T, A>(widen(narrow<T, A>(widen(x[i]) * scale)) * widen(weight[i]));
}

template <class T>
void rms_norm(const T* x, const T* weight, T* out, int64_t rows, int64_t size, double eps) {
#pragma omp parallel for if (rows * size > SERIAL)
    for (int64_t row = 0; row < rows; row++) norm_row<T>(x + row * size, weight, out + row * size, size, eps);
}

template <class T>
void add_rms_norm(const T* x, T* residual, const T* weight, T* out, int64_t rows, int64_t size, double eps) {
    using A = Wide<T>;
#pragma omp parallel for if (rows * size > SERIAL)
    for (int64_t row = 0; row < rows; row++) {
        T* sum = residual + row * size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) sum[i] = narrow<T, A>(widen(sum[i]) + widen(x[row * size + i]));
        norm_row<T>(sum, weight, out + row * size, size, eps);
    }
}

template <class T>
void silu_mul(const T* gate_up, T* out, int64_t rows, int64_t size) {
    using A = Wide<T>;
#pragma omp parallel for if (rows * size > SERIAL)
    for (int64_t row = 0; row < rows; row++) {
        const T* gate = gate_up + 2 * row * size;
        const T* up = gate + size;
        T* to = out + row * size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
            const A g = widen(gate[i]);
            to[i] = narrow<T, A>(widen(narrow<T, A>(g / (A(1) + exponential(-g)))) * widen(up[i]));
        }
    }
}

template <class T>
void rotate_and_store(const T* heads, const T* norms, const T* cos, const T* sin, const int64_t* slots, T* q, T* keys,
                      T* values, int64_t tokens, int64_t num_q, int64_t num_kv, int64_t dim, double eps) {
    using A = Wide<T>;
    const int64_t num_heads = num_q + 2 * num_kv;
    const int64_t half = dim / 2;
#pragma omp parallel if (tokens * num_heads * dim > SERIAL)
    {
        std::vector<T> normed(dim);
#pragma omp for
        for (int64_t token = 0; token < tokens; token++) {
            const T* c = cos + token * dim;
            const T* s = sin + token * dim;
            for (int64_t head = 0; head < num_heads; head++) {
                const T* in = heads + (token * num_heads + head) * dim;
                const int64_t kv = (slots[token] * num_kv + (head - num_q) % num_kv) * dim;
                if (head >= num_q + num_kv) {
                    std::memcpy(values + kv, in, dim * sizeof(T));
                    continue;
                }
                if (norms != nullptr) {
                    norm_row<T>(in, norms + (head < num_q ? 0 : dim), normed.data(), dim, eps);
                    in = normed.data();
                }
                T* to = head < num_q ? q + (token * num_q + head) * dim : keys + kv;
#pragma omp simd
                for (int64_t i = 0; i < half; i++) {
                    const A x = widen(in[i]), y = widen(in[i + half]);
                    to[i] = narrow<T, A>(std::fma(y, A(widen(s[i])), A(widen(narrow<T, A>(x * widen(c[i]))))));
                    to[i + half] = narrow<T, A>(
                        std::fma(x, A(widen(s[i + half])), A(widen(narrow<T, A>(y * widen(c[i + half]))))));
                }
            }
        }
    }
}

// -- products with few rows

constexpr int64_t NEAR = 4096;  // bytes: so far ahead a matrix, which is read once from end to end, is asked for

// Successive outputs of ROWS rows of x: each is a sum of products in one order, whatever ROWS is.
template <class T, int ROWS>
void few_rows_part(const T* x, const T* weight, T* out, int64_t inputs, int64_t outputs, int64_t first, int64_t last) {
    using A = Wide<T>;
    constexpr int64_t step = STEP<T>;
    const int64_t whole = inputs / (2 * step) * (2 * step);
    for (int64_t output = first; output < last; output++) {
        const T* row = weight + output * inputs;
        Vector<A> even[ROWS] = {}, odd[ROWS] = {};
        for (int64_t i = 0; i < whole; i += 2 * step) {
            for (int64_t ahead = 0; ahead < 2 * step; ahead += 64 / sizeof(T))
                __builtin_prefetch(reinterpret_cast<const char*>(row + i + ahead) + NEAR);
            for (int r = 0; r < ROWS; r++) {
                add_products(even[r], x + r * inputs + i, row + i);
                add_products(odd[r], x + r * inputs + i + step, row + i + step);
            }
        }
        for (int r = 0; r < ROWS; r++) {
            A sum = total<A>(even[r] + odd[r]);
            for (int64_t i = whole; i < inputs; i++) sum = std::fma(A(widen(x[r * inputs + i])), A(widen(row[i])), sum);
            out[r * outputs + output] = narrow<T, A>(sum);
        }
    }
}

// x [rows, inputs] @ weight [outputs, inputs].T, for 0 to 4 rows.
template <class T>
void few_rows(const T* x, const T* weight, T* out, int64_t rows, int64_t inputs, int64_t outputs) {
    constexpr decltype(&few_rows_part<T, 1>) BY_ROWS[] = {
        few_rows_part<T, 1>, few_rows_part<T, 2>, few_rows_part<T, 3>, few_rows_part<T, 4>};
    if (rows == 0) return;
    constexpr int64_t SHARE = 16;  // outputs
#pragma omp parallel for schedule(static) if (inputs * outputs > SERIAL)
    for (int64_t first = 0; first < outputs; first += SHARE)
        BY_ROWS[rows - 1](x, weight, out, inputs, outputs, first, first + SHARE < outputs ? first + SHARE : outputs);
}

constexpr int64_t TILE = 4;     // tokens at a time: their sums do not wait for each other
constexpr int64_t AHEAD = 32;   // tokens: so far ahead of its use a row of the cache, which lies anywhere, is asked for
constexpr int INTO_L2 = 2;       // the cache that it is asked for into: more can be under way there than to the first

// Where a layer's keys or values of a sequence are, for one KV head.
template <class T>
struct Rows {
    const T* cache;  // of the head's first element
    const int32_t* table;
    int64_t block_size, stride;

    // Asks for the tokens from `first` to `last`. Inlined by force: of a function that does nothing else, GCC drops the
    // calls.
    __attribute__((always_inline)) void prefetch(int64_t first, int64_t last, int64_t size) const {
        int64_t block = first / block_size, offset = first % block_size;
        for (int64_t token = first; token < last; token++) {
            const T* row = cache + (table[block] * block_size + offset) * stride;
            for (int64_t i = 0; i < size; i += 64 / sizeof(T)) __builtin_prefetch(row + i, 0, INTO_L2);
            if (++offset == block_size) block++, offset = 0;
        }
    }

    // The first `count` tokens of a tile from `first` on, in whole vectors: as they lie, or copied to `memory` where
    // they end within one. What is beyond `count` is `nothing`.
    void tile(int64_t first, int64_t count, int64_t size, int64_t padded, T* memory, const T* nothing,
              const T* rows[TILE]) const {
        prefetch(first + AHEAD, first + std::min(count, AHEAD + TILE), size);
        int64_t block = first / block_size, offset = first % block_size;
        for (int64_t t = 0; t < TILE; t++) {
            if (t >= count) {
                rows[t] = nothing;
                continue;
            }
            rows[t] = cache + (table[block] * block_size + offset) * stride;
            if (++offset == block_size) block++, offset = 0;
            if (size < padded) {
                std::memcpy(memory + t * padded, rows[t], size * sizeof(T));
                std::memset(memory + t * padded + size, 0, (padded - size) * sizeof(T));
                rows[t] = memory + t * padded;
            }
        }
    }
};

// Scores to shares, in place. `row` has whole vectors: what is beyond `length` becomes zeros.
template <class A>
inline void softmax(A* row, int64_t length, A scale) {
    A highest = row[0];
#pragma omp simd reduction(max : highest)
    for (int64_t t = 0; t < length; t++) highest = row[t] > highest ? row[t] : highest;
    const int64_t padded = whole_vectors<A>(length);
    for (int64_t t = length; t < padded; t++) row[t] = highest;
    Vector<A> sums = {};
    for (int64_t first = 0; first < padded; first += LANES<A>) {
#pragma omp simd
        for (int64_t t = first; t < first + LANES<A>; t++) {
            const A share = exponential((row[t] - highest) * scale);
            row[t] = t < length ? share : A(0);
        }
        sums += load(row + first);
    }
    const A inverse = A(1) / total<A>(sums);
#pragma omp simd
    for (int64_t t = 0; t < padded; t++) row[t] *= inverse;
}

template <class T>
struct Memory {
    std::vector<Wide<T>> wide;
    std::vector<T> narrow;
};

// `rows` successive tokens of a sequence, and the `group` query heads of one KV head: token r sees `length` + r tokens.
// Keys and values are read once for all of them; what is computed for one does not depend on the others.
template <class T, int DIM>
void attend(const T* q, Rows<T> keys, Rows<T> values, T* out, int64_t stride, int64_t length, int64_t rows,
            int64_t group, int64_t dim, double scale, Memory<T>& memory) {
    using A = Wide<T>;
    if (DIM) dim = DIM;  // known to the compiler
    const int64_t size = (dim + STEP<T> - 1) / STEP<T> * STEP<T>;
    const int64_t longest = length + rows - 1;
    const int64_t width = whole_vectors<A>(longest);
    const int64_t end = rows * group;
    memory.wide.resize(end * (width + size));
    memory.narrow.resize((end + TILE + 1) * size);
    A* scores = memory.wide.data();     // [rows * group][width]
    A* sums = scores + end * width;     // [rows * group][size]
    T* queries = memory.narrow.data();  // [rows * group][size]
    T* tile = queries + end * size;     // [TILE][size]
    T* nothing = tile + TILE * size;    // [size]
    const T* from[TILE];
    std::memset(queries, 0, (end + TILE + 1) * size * sizeof(T));
    for (int64_t index = 0; index < end; index++)
        std::memcpy(queries + index * size, q + index / group * stride + index % group * dim, dim * sizeof(T));
    for (int64_t i = 0; i < end * size; i++) sums[i] = 0;
    values.prefetch(0, std::min(longest, AHEAD), dim);
    for (int64_t first = 0; first < longest; first += TILE) {
        keys.tile(first, longest - first, dim, size, tile, nothing, from);
        for (int64_t index = first < length ? 0 : (first - length + 1) * group; index < end; index++) {
            const T* query = queries + index * size;
            Vector<A> s0 = {}, s1 = {}, s2 = {}, s3 = {};
            for (int64_t i = 0; i < size; i += STEP<T>) {
                add_products(s0, query + i, from[0] + i);
                add_products(s1, query + i, from[1] + i);
                add_products(s2, query + i, from[2] + i);
                add_products(s3, query + i, from[3] + i);
            }
            four_totals<A>(s0, s1, s2, s3, scores + index * width + first);
        }
    }
    for (int64_t index = 0; index < end; index++)
        softmax(scores + index * width, length + index / group, A(scale));
    for (int64_t first = 0; first < longest; first += TILE) {
        values.tile(first, longest - first, dim, size, tile, nothing, from);
        const int64_t begin = first < length ? 0 : (first - length + 1) * group;
        for (int64_t i = 0; i < size; i += LANES<A>) {
            const Vector<A> v0 = load_wide(from[0] + i), v1 = load_wide(from[1] + i), v2 = load_wide(from[2] + i),
                            v3 = load_wide(from[3] + i);
            for (int64_t index = begin; index < end; index++) {
                const A* share = scores + index * width + first;
                A* sum = sums + index * size + i;
                Vector<A> x = load(sum);
                x += share[0] * v0;
                x += share[1] * v1;
                x += share[2] * v2;
                x += share[3] * v3;
                std::memcpy(sum, &x, sizeof x);
            }
        }
    }
    for (int64_t index = 0; index < end; index++) {
        T* to = out + index / group * stride + index % group * dim;
#pragma omp simd
        for (int64_t i = 0; i < dim; i++) to[i] = narrow<T, A>(sums[index * size + i]);
    }
}

// The share of one KV head and some successive tokens of a sequence.
struct Part {
    int64_t sequence, head, first, rows;
};

constexpr int64_t SCORES = 1 << 15;  // of a part, at most where it has several tokens: they stay in the cache

template <class T>
void paged_attention(const T* q, const T* keys, const T* values, T* out, const int32_t* tables, int64_t table_stride,
                     const int32_t* starts, const int32_t* lengths, int64_t sequences, int64_t num_q, int64_t num_kv,
                     int64_t block_size, int64_t dim, double scale) {
    const int64_t group = num_q / num_kv;
    const auto run = dim == 32    ? attend<T, 32>
                     : dim == 64  ? attend<T, 64>
                     : dim == 128 ? attend<T, 128>
                                  : attend<T, 0>;
    std::vector<Part> parts;
    for (int64_t sequence = 0; sequence < sequences; sequence++) {
        const int64_t rows = starts[sequence + 1] - starts[sequence];
        const int64_t fit = SCORES / (group * lengths[sequence]);
        const int64_t step = fit < 1 ? 1 : fit < 16 ? fit : 16;
        for (int64_t first = 0; first < rows; first += step)
            for (int64_t head = 0; head < num_kv; head++)
                parts.push_back({sequence, head, first, rows - first < step ? rows - first : step});
    }
    const auto rows_of = [&](const T* cache, const Part& part) {
        return Rows<T>{cache + part.head * dim, tables + part.sequence * table_stride, block_size, num_kv * dim};
    };
    // A thread takes a few sequences at a time where there are many: their heads lie side by side, and it knows the next.
    const int64_t even = int64_t(parts.size()) / (8 * omp_get_max_threads());
    const int64_t share = std::max<int64_t>(1, std::min(even, 4 * num_kv));
#pragma omp parallel
    {
        Memory<T> memory;
#pragma omp for schedule(dynamic, share)
        for (size_t index = 0; index < parts.size(); index++) {
            const Part part = parts[index];
            if ((index + 1) % share && index + 1 < parts.size()) {
                const Part& next = parts[index + 1];
                rows_of(keys, next).prefetch(0, std::min<int64_t>(lengths[next.sequence], AHEAD), dim);
            }
            const int64_t row = starts[part.sequence] + part.first;
            const int64_t new_tokens = starts[part.sequence + 1] - starts[part.sequence];
            const int64_t length = lengths[part.sequence] - new_tokens + part.first + 1;
            const int64_t at = (row * num_q + part.head * group) * dim;
            run(q + at, rows_of(keys, part), rows_of(values, part), out + at, num_q * dim, length, part.rows, group, dim,
                scale, memory);
        }
    }
}

// -- sampling

// engines/sampling/noise.py, whose numbers these are.
constexpr uint64_t GOLDEN_GAMMA = 0x9E3779B97F4A7C15u;

inline uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

inline double gumbel(uint32_t bits) { return -std::log(-std::log((double(bits ^ 0x80000000u) + 0.5) * 0x1p-32)); }

// No less than the noise of these bits: -log(-log u) <= -log(1 - u), and of that logarithm only the exponent is taken.
inline float most_gumbel(uint32_t bits) {
    const float rest = float(0xFFFFFFFFu - (bits ^ 0x80000000u)) + 0.5f;  // (1 - u) 2^32
    int32_t pattern;
    std::memcpy(&pattern, &rest, sizeof pattern);
    return float(159 - (pattern >> 23)) * 0.6931472f + 1e-4f;
}

// What some successive tokens of a row tell: their part of the sum of exponentials, and the best of them.
template <class A>
struct Drawn {
    A highest;
    double sum;  // of exp(logit - highest)
    double score;
    int64_t token;
};

constexpr int64_t VOCABULARY = 1 << 13;  // tokens of a part: the parts of a row may run in several threads

// Ties go to the lowest token. `logits` are scaled, and in whole vectors: what is beyond `count` is minus infinity.
template <class A>
Drawn<A> draw_part(const A* logits, int64_t count, int64_t first, uint64_t seed, bool greedy) {
    const int64_t padded = whole_vectors<A>(count);
    A highest = logits[0];
#pragma omp simd reduction(max : highest)
    for (int64_t i = 0; i < count; i++) highest = logits[i] > highest ? logits[i] : highest;
    if (highest == -INFINITY) return {highest, 0.0, -INFINITY, first};  // none of these is allowed
    Vector<A> sums = {};
    for (int64_t start = 0; start < padded; start += LANES<A>) {
        A terms[LANES<A>];
#pragma omp simd
        for (int64_t i = 0; i < LANES<A>; i++) terms[i] = exponential(logits[start + i] - highest);
        sums += load(terms);
    }
    int64_t best = 0;
    while (best < count - 1 && logits[best] != highest) best++;
    Drawn<A> drawn{highest, double(total<A>(sums)), double(highest), first + best};
    if (greedy) return drawn;
    const auto bits_of = [&](int64_t i) {
        const uint64_t pair = mix64(seed + uint64_t((first + i) / 2 + 1) * GOLDEN_GAMMA);
        return uint32_t(i & 1 ? pair >> 32 : pair);  // a part begins with an even token
    };
    drawn.score += gumbel(bits_of(best));
    for (int64_t start = 0; start < padded; start += 16) {
        uint32_t bits[16];
#pragma omp simd
        for (int64_t p = 0; p < 8; p++) {
            const uint64_t pair = mix64(seed + uint64_t((first + start) / 2 + p + 1) * GOLDEN_GAMMA);
            bits[2 * p] = uint32_t(pair), bits[2 * p + 1] = uint32_t(pair >> 32);
        }
        const A bound = A(drawn.score);
        int any = 0;
#pragma omp simd reduction(| : any)
        for (int64_t i = 0; i < 16; i++) any |= logits[start + i] + A(most_gumbel(bits[i])) >= bound;
        if (!any) continue;
        for (int64_t i = start; i < start + 16 && i < count; i++) {
            if (logits[i] + A(most_gumbel(bits[i - start])) < A(drawn.score)) continue;
            const double score = double(logits[i]) + gumbel(bits[i - start]);
            if (score > drawn.score || (score == drawn.score && first + i < drawn.token))
                drawn.score = score, drawn.token = first + i;
        }
    }
    return drawn;
}

// One token for each row of logits [rows, vocabulary], `stride` elements apart; a temperature of 0 is greedy.
template <class T>
void sample(const T* logits, int64_t stride, const int64_t* keys, const int64_t* positions, const double* temperatures,
            int64_t* tokens, Wide<T>* logprobs, int64_t rows, int64_t vocabulary) {
    using A = Wide<T>;
    const int64_t parts = (vocabulary + VOCABULARY - 1) / VOCABULARY;
    std::vector<Drawn<A>> all(rows * parts);
#pragma omp parallel if (rows * vocabulary > SERIAL)
    {
        std::vector<A> scaled(VOCABULARY);
#pragma omp for schedule(static)
        for (int64_t index = 0; index < rows * parts; index++) {
            const int64_t row = index / parts, first = index % parts * VOCABULARY;
            const int64_t count = vocabulary - first < VOCABULARY ? vocabulary - first : VOCABULARY;
            const T* from = logits + row * stride + first;
            const bool greedy = temperatures[row] == 0;
            const A temperature = greedy ? A(1) : A(temperatures[row]);
#pragma omp simd
            for (int64_t i = 0; i < count; i++) scaled[i] = widen(from[i]) / temperature;
            for (int64_t i = count; i < (count + 15) / 16 * 16; i++) scaled[i] = -INFINITY;
            const uint64_t seed = mix64(uint64_t(keys[row]) + uint64_t(positions[row] + 1) * GOLDEN_GAMMA);
            all[index] = draw_part<A>(scaled.data(), count, first, seed, greedy);
        }
    }
    for (int64_t row = 0; row < rows; row++) {
        Drawn<A>* of_row = &all[row * parts];
        Drawn<A> best = of_row[0];
        for (int64_t part = 1; part < parts; part++) {
            if (of_row[part].score > best.score) best.score = of_row[part].score, best.token = of_row[part].token;
            if (of_row[part].highest > best.highest) best.highest = of_row[part].highest;
        }
        double sum = 0;
        for (int64_t part = 0; part < parts; part++)
            sum += of_row[part].sum * std::exp(double(of_row[part].highest) - double(best.highest));
        const bool greedy = temperatures[row] == 0;
        const A temperature = greedy ? A(1) : A(temperatures[row]);
        const A chosen = widen(logits[row * stride + best.token]) / temperature;
        tokens[row] = best.token;
        logprobs[row] = A(double(chosen) - double(best.highest) - std::log(sum));
    }
}

}  // namespace

// Up to how many rows `few_rows` is the faster way; none for float64, where only equality counts.
extern "C" int64_t most_rows_bfloat16() { return PAIRS<bf16> ? 4 : 2; }
extern "C" int64_t most_rows_float32() { return 2; }
extern "C" int64_t most_rows_float64() { return 0; }

#define FOR_TYPE(SUFFIX, T)                                                                                            \
    extern "C" void sample_##SUFFIX(const T* logits, int64_t stride, const int64_t* keys, const int64_t* positions,    \
                                    const double* temperatures, int64_t* tokens, Wide<T>* logprobs, int64_t rows,      \
                                    int64_t vocabulary) {                                                              \
        sample<T>(logits, stride, keys, positions, temperatures, tokens, logprobs, rows, vocabulary);                  \
    }                                                                                                                  \
    extern "C" void few_rows_##SUFFIX(const T* x, const T* weight, T* out, int64_t rows, int64_t inputs,               \
                                      int64_t outputs) {                                                               \
        few_rows<T>(x, weight, out, rows, inputs, outputs);                                                            \
    }                                                                                                                  \
    extern "C" void rms_norm_##SUFFIX(const T* x, const T* weight, T* out, int64_t rows, int64_t size, double eps) {   \
        rms_norm<T>(x, weight, out, rows, size, eps);                                                                  \
    }                                                                                                                  \
    extern "C" void add_rms_norm_##SUFFIX(const T* x, T* residual, const T* weight, T* out, int64_t rows,              \
                                          int64_t size, double eps) {                                                  \
        add_rms_norm<T>(x, residual, weight, out, rows, size, eps);                                                    \
    }                                                                                                                  \
    extern "C" void silu_mul_##SUFFIX(const T* gate_up, T* out, int64_t rows, int64_t size) {                          \
        silu_mul<T>(gate_up, out, rows, size);                                                                         \
    }                                                                                                                  \
    extern "C" void rotate_and_store_##SUFFIX(const T* heads, const T* norms, const T* cos, const T* sin,              \
                                              const int64_t* slots, T* q, T* keys, T* values, int64_t tokens,          \
                                              int64_t num_q, int64_t num_kv, int64_t dim, double eps) {                \
        rotate_and_store<T>(heads, norms, cos, sin, slots, q, keys, values, tokens, num_q, num_kv, dim, eps);          \
    }                                                                                                                  \
    extern "C" void paged_attention_##SUFFIX(                                                                          \
        const T* q, const T* keys, const T* values, T* out, const int32_t* tables, int64_t table_stride,               \
        const int32_t* starts, const int32_t* lengths, int64_t sequences, int64_t num_q, int64_t num_kv,               \
        int64_t block_size, int64_t dim, double scale) {                                                               \
        paged_attention<T>(q, keys, values, out, tables, table_stride, starts, lengths, sequences, num_q, num_kv,      \
                           block_size, dim, scale);                                                                    \
    }

FOR_TYPE(bfloat16, bf16)
FOR_TYPE(float32, float)
FOR_TYPE(float64, double)
