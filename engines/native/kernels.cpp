// CPU kernels: the decoder's small operations, each in one pass over its data, and products of few rows. Attention and
// sampling are in the headers. The torch versions in engines/models/operations.py and projection.py document shapes and
// meaning. Kernels round to the storage type T where the torch versions do, and compute in A = max(float, T). A row's
// result depends only on the row: it has the same bits in any batch and with any number of threads. Therefore sums are
// vectors with explicit lanes and order: if the compiler chose these, two copies of a loop could sum in two orders.

#include "attention.h"
#include "sampling.h"
#include "vectors.h"

namespace {

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

constexpr int64_t NEAR = 4096;  // prefetch distance in bytes for a matrix, which is read once from end to end

// Outputs `first` to `last` of ROWS rows of x. Each is a sum of products, whose order is the same for any ROWS.
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

}  // namespace

// Most rows for which `few_rows` is the faster way; 0 for float64, where only equality counts.
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
