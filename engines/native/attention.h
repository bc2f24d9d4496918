// Attention over the paged cache, read in place. Torch version: engines/attention/sdpa.py.
#pragma once

#include <omp.h>

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t TILE = 4;     // tokens at a time: their sums do not wait for each other
constexpr int64_t AHEAD = 32;   // prefetch distance in tokens: rows of the KV cache are scattered in memory
constexpr int INTO_L2 = 2;       // prefetch into the second-level cache: it takes more loads at a time than the first

// Addresses of a sequence's keys or values in a layer, for one KV head.
template <class T>
struct Rows {
    const T* cache;  // the head's first element
    const int32_t* table;
    int64_t block_size, stride;

    // Prefetches tokens `first` to `last`. Inlining is forced: GCC drops calls of a function that only prefetches.
    __attribute__((always_inline)) void prefetch(int64_t first, int64_t last, int64_t size) const {
        int64_t block = first / block_size, offset = first % block_size;
        for (int64_t token = first; token < last; token++) {
            const T* row = cache + (table[block] * block_size + offset) * stride;
            for (int64_t i = 0; i < size; i += 64 / sizeof(T)) __builtin_prefetch(row + i, 0, INTO_L2);
            if (++offset == block_size) block++, offset = 0;
        }
    }

    // Sets `rows` to a tile's tokens from `first` on, in whole vectors: in place, or copied to `memory` and padded with
    // zeros if they end within a vector. Rows from `count` on point to `nothing`.
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

// Replaces scores by their softmax, in place. `row` has whole vectors: elements from `length` on become zeros.
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

// Attention of `rows` successive tokens of a sequence, for the `group` query heads of one KV head: token r sees
// `length` + r tokens. Keys and values are read once for all; no token's result depends on the others.
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

// A unit of work: one KV head, and `rows` successive new tokens of a sequence from `first` on.
struct Part {
    int64_t sequence, head, first, rows;
};

constexpr int64_t SCORES = 1 << 15;  // most scores of a part with several tokens: they stay in the processor's cache

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
    // Of many sequences a thread takes a few at a time: their heads are adjacent, and it can prefetch the next part.
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

}  // namespace
