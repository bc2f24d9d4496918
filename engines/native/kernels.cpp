// CPU kernels: the decoder's small operations, each in one pass over its data, and products of few rows. Attention and
// sampling are in the headers. The torch versions in engines/models/operations.py and projection.py document shapes and
// meaning. Kernels round to the storage type T where the torch versions do, and compute in A = max(float, T). A row's
// result depends only on the row: it has the same bits in any batch and with any number of threads. Therefore sums are
// vectors with explicit lanes and order: if the compiler chose these, two copies of a loop could sum in two orders.

#include <utility>

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

constexpr int64_t OUTPUTS = 4;                      // of a tile, whose sums stay in registers
constexpr int MOST_ROWS = REGISTER == 64 ? 6 : 3;  // of which there are 32 or 16

// `COUNT` outputs of `ROWS` rows of x. Each is a sum of products, whose order is the same in every tile. It
// prefetches rows `ahead` to `end` of the matrix, of those behind its own `COUNT`.
template <class T, int COUNT, int ROWS>
void product_tile(const T* x, const T* weight, T* out, int64_t inputs, int64_t outputs, int64_t ahead,
                  int64_t end) {
    using A = Wide<T>;
    constexpr int64_t line = 64 / sizeof(T);
    const int64_t whole = inputs / line * line;
    Vector<A, REGISTER> sums[ROWS][COUNT] = {};
    for (int64_t first = 0; first < whole; first += line) {
        for (int64_t o = ahead; o < end; o++) __builtin_prefetch(weight + (COUNT + o) * inputs + first);
        for (int64_t i = first; i < first + line; i += STEP<T, REGISTER>)
            for (int r = 0; r < ROWS; r++)
                for (int64_t o = 0; o < COUNT; o++)
                    add_products<T, REGISTER>(sums[r][o], x + r * inputs + i, weight + o * inputs + i);
    }
    for (int r = 0; r < ROWS; r++) {
        A totals[COUNT];
        if constexpr (COUNT == 4)
            four_totals<A, REGISTER>(sums[r][0], sums[r][1], sums[r][2], sums[r][3], totals);
        else
            for (int64_t o = 0; o < COUNT; o++) totals[o] = total<A, REGISTER>(sums[r][o]);
        for (int64_t o = 0; o < COUNT; o++) {
            for (int64_t i = whole; i < inputs; i++)
                totals[o] = std::fma(A(widen(x[r * inputs + i])), A(widen(weight[o * inputs + i])), totals[o]);
            out[r * outputs + o] = narrow<T, A>(totals[o]);
        }
    }
}

// `COUNT` outputs of all rows: the matrix's rows stay in the processor's cache from one tile to the next. Each tile
// prefetches its share of the next rows, so that memory is read while all of them compute.
template <class T, int COUNT, int... ROWS>
void product_tiles(const T* x, const T* weight, T* out, int64_t rows, int64_t inputs, int64_t outputs,
                   std::integer_sequence<int, ROWS...>) {
    constexpr decltype(&product_tile<T, COUNT, 1>) BY_ROWS[] = {product_tile<T, COUNT, ROWS + 1>...};
    const int64_t tiles = (rows + MOST_ROWS - 1) / MOST_ROWS;
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t row = tile * MOST_ROWS, count = std::min<int64_t>(rows - row, MOST_ROWS);
        BY_ROWS[count - 1](x + row * inputs, weight, out + row * outputs, inputs, outputs, tile * COUNT / tiles,
                           (tile + 1) * COUNT / tiles);
    }
}

// x [rows, inputs] @ weight [outputs, inputs].T
template <class T>
void few_rows(const T* x, const T* weight, T* out, int64_t rows, int64_t inputs, int64_t outputs) {
    constexpr auto SIZES = std::make_integer_sequence<int, MOST_ROWS>();
    constexpr int64_t SHARE = 16;  // outputs
#pragma omp parallel for schedule(static) if (inputs * outputs > SERIAL)
    for (int64_t first = 0; first < outputs; first += SHARE) {
        const int64_t last = std::min(first + SHARE, outputs);
        int64_t output = first;
        for (; output + OUTPUTS <= last; output += OUTPUTS)
            product_tiles<T, OUTPUTS>(x, weight + output * inputs, out + output, rows, inputs, outputs, SIZES);
        for (; output < last; output++)
            product_tiles<T, 1>(x, weight + output * inputs, out + output, rows, inputs, outputs, SIZES);
    }
}

}  // namespace

// Most rows for which `few_rows` takes no longer than the matrix library; 0 for float64, where only equality counts.
extern "C" int64_t most_rows_bfloat16() { return 16; }
extern "C" int64_t most_rows_float32() { return 16; }
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
