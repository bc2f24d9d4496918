// The decoder's small operations on a CPU, each in one pass over its data, and attention of decodes over the paged
// cache. Twins, with the shapes and the meaning, are in engines/models/operations.py and engines/attention/sdpa.py.
// They round to the storage type T where the twins do, and compute in A = max(float, T). What is done for a row depends
// on nothing but the row: the same bits in any batch and with any number of threads.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

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

template <class T>
inline void norm_row(const T* x, const T* weight, T* out, int64_t size, double eps) {
    using A = Wide<T>;
    A sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) sum += widen(x[i]) * widen(x[i]);
    const A scale = A(1) / std::sqrt(sum / A(size) + A(eps));
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
                    to[i] = narrow<T, A>(widen(narrow<T, A>(x * widen(c[i]))) + y * widen(s[i]));
                    to[i + half] = narrow<T, A>(widen(narrow<T, A>(y * widen(c[i + half]))) + x * widen(s[i + half]));
                }
            }
        }
    }
}

constexpr int TILE = 4;  // tokens at a time: their sums do not wait for each other

// Where a layer's keys or values of a sequence are, for one KV head.
template <class T>
struct Rows {
    const T* cache;  // of the head's first element
    const int32_t* table;
    int64_t block_size, stride;

    // A tile of tokens from `first` on, wide; of those beyond `count` zeros. `memory` holds what is not wide as it lies.
    void tile(int64_t first, int64_t count, int64_t size, Wide<T>* memory, const Wide<T>* rows[TILE]) const {
        int64_t block = first / block_size, offset = first % block_size;
        for (int64_t t = 0; t < TILE; t++) {
            Wide<T>* row = memory + t * size;
            rows[t] = row;
            if (t >= count) {
                for (int64_t i = 0; i < size; i++) row[i] = 0;
                continue;
            }
            const T* from = cache + (table[block] * block_size + offset) * stride;
            if (t + block_size < count) {  // blocks lie anywhere: no processor foresees where the next one is
                const T* next = cache + (table[block + 1] * block_size + offset) * stride;
                for (int64_t i = 0; i < size; i += 64 / sizeof(T)) __builtin_prefetch(next + i);
            }
            if (++offset == block_size) block++, offset = 0;
            if constexpr (std::is_same_v<T, Wide<T>>) {
                rows[t] = from;
            } else {
#pragma omp simd
                for (int64_t i = 0; i < size; i++) row[i] = widen(from[i]);
            }
        }
    }
};

// One sequence and KV head: its `group` query heads over `length` tokens.
template <class T, int DIM>
void attend(const T* q, Rows<T> keys, Rows<T> values, T* out, int64_t length, int64_t group, int64_t dim, double scale,
            std::vector<Wide<T>>& memory) {
    using A = Wide<T>;
    const int64_t size = DIM ? DIM : dim;
    const int64_t padded = (length + TILE - 1) / TILE * TILE;
    memory.resize(group * (padded + 2 * size) + TILE * size);
    A* scores = memory.data();             // [group][padded]
    A* queries = scores + group * padded;  // [group][size]
    A* sums = queries + group * size;      // [group][size]
    A* tile = sums + group * size;         // [TILE][size]
    const A* rows[TILE];
    for (int64_t i = 0; i < group * size; i++) queries[i] = widen(q[i]) * A(scale);
    for (int64_t first = 0; first < length; first += TILE) {
        keys.tile(first, length - first, size, tile, rows);
        const A *r0 = rows[0], *r1 = rows[1], *r2 = rows[2], *r3 = rows[3];
        for (int64_t head = 0; head < group; head++) {
            const A* query = queries + head * size;
            A s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
            for (int64_t i = 0; i < size; i++) {
                s0 += query[i] * r0[i];
                s1 += query[i] * r1[i];
                s2 += query[i] * r2[i];
                s3 += query[i] * r3[i];
            }
            A* to = scores + head * padded + first;
            to[0] = s0, to[1] = s1, to[2] = s2, to[3] = s3;
        }
    }
    for (int64_t head = 0; head < group; head++) {
        A* row = scores + head * padded;
        A highest = row[0];
#pragma omp simd reduction(max : highest)
        for (int64_t t = 0; t < length; t++) highest = row[t] > highest ? row[t] : highest;
        A sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t t = 0; t < length; t++) {
            row[t] = exponential(row[t] - highest);
            sum += row[t];
        }
        const A inverse = A(1) / sum;
#pragma omp simd
        for (int64_t t = 0; t < length; t++) row[t] *= inverse;
        for (int64_t t = length; t < padded; t++) row[t] = 0;
    }
    for (int64_t i = 0; i < group * size; i++) sums[i] = 0;
    for (int64_t first = 0; first < length; first += TILE) {
        values.tile(first, length - first, size, tile, rows);
        const A *r0 = rows[0], *r1 = rows[1], *r2 = rows[2], *r3 = rows[3];
        for (int64_t head = 0; head < group; head++) {
            const A* share = scores + head * padded + first;
            const A p0 = share[0], p1 = share[1], p2 = share[2], p3 = share[3];
            A* sum = sums + head * size;
#pragma omp simd
            for (int64_t i = 0; i < size; i++)
                sum[i] += p0 * r0[i] + p1 * r1[i] + p2 * r2[i] + p3 * r3[i];
        }
    }
#pragma omp simd
    for (int64_t i = 0; i < group * size; i++) out[i] = narrow<T, A>(sums[i]);
}

template <class T>
void decode_attention(const T* q, const T* keys, const T* values, T* out, const int32_t* tables, int64_t table_stride,
                      const int32_t* lengths, int64_t sequences, int64_t num_q, int64_t num_kv, int64_t block_size,
                      int64_t dim, double scale) {
    const int64_t group = num_q / num_kv;
    const auto run = dim == 32    ? attend<T, 32>
                     : dim == 64  ? attend<T, 64>
                     : dim == 128 ? attend<T, 128>
                                  : attend<T, 0>;
#pragma omp parallel
    {
        std::vector<Wide<T>> memory;
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t sequence = 0; sequence < sequences; sequence++) {
            for (int64_t head = 0; head < num_kv; head++) {
                const int64_t first = (sequence * num_q + head * group) * dim;
                const int32_t* table = tables + sequence * table_stride;
                const Rows<T> key_rows{keys + head * dim, table, block_size, num_kv * dim};
                const Rows<T> value_rows{values + head * dim, table, block_size, num_kv * dim};
                run(q + first, key_rows, value_rows, out + first, lengths[sequence], group, dim, scale, memory);
            }
        }
    }
}

}  // namespace

#define FOR_TYPE(SUFFIX, T)                                                                                            \
    extern "C" void rms_norm_##SUFFIX(const T* x, const T* weight, T* out, int64_t rows, int64_t size, double eps) {    \
        rms_norm<T>(x, weight, out, rows, size, eps);                                                                  \
    }                                                                                                                  \
    extern "C" void add_rms_norm_##SUFFIX(const T* x, T* residual, const T* weight, T* out, int64_t rows,               \
                                          int64_t size, double eps) {                                                  \
        add_rms_norm<T>(x, residual, weight, out, rows, size, eps);                                                    \
    }                                                                                                                  \
    extern "C" void silu_mul_##SUFFIX(const T* gate_up, T* out, int64_t rows, int64_t size) {                           \
        silu_mul<T>(gate_up, out, rows, size);                                                                         \
    }                                                                                                                  \
    extern "C" void rotate_and_store_##SUFFIX(const T* heads, const T* norms, const T* cos, const T* sin,               \
                                              const int64_t* slots, T* q, T* keys, T* values, int64_t tokens,          \
                                              int64_t num_q, int64_t num_kv, int64_t dim, double eps) {                \
        rotate_and_store<T>(heads, norms, cos, sin, slots, q, keys, values, tokens, num_q, num_kv, dim, eps);          \
    }                                                                                                                  \
    extern "C" void decode_attention_##SUFFIX(const T* q, const T* keys, const T* values, T* out,                       \
                                              const int32_t* tables, int64_t table_stride, const int32_t* lengths,     \
                                              int64_t sequences, int64_t num_q, int64_t num_kv, int64_t block_size,    \
                                              int64_t dim, double scale) {                                             \
        decode_attention<T>(q, keys, values, out, tables, table_stride, lengths, sequences, num_q, num_kv, block_size, \
                            dim, scale);                                                                               \
    }

FOR_TYPE(bfloat16, bf16)
FOR_TYPE(float32, float)
FOR_TYPE(float64, double)
