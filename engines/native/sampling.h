// Draws one token per row. Torch versions: engines/sampling/sampler.py and noise.py.
#pragma once

#include <vector>

#include "vectors.h"

namespace {

// The same numbers as in engines/sampling/noise.py.
constexpr uint64_t GOLDEN_GAMMA = 0x9E3779B97F4A7C15u;

inline uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

inline double gumbel(uint32_t bits) { return -std::log(-std::log((double(bits ^ 0x80000000u) + 0.5) * 0x1p-32)); }

// An upper bound of the noise of these bits: -log(-log u) <= -log(1 - u), computed only from the exponent of 1 - u.
inline float most_gumbel(uint32_t bits) {
    const float rest = float(0xFFFFFFFFu - (bits ^ 0x80000000u)) + 0.5f;  // (1 - u) 2^32
    int32_t pattern;
    std::memcpy(&pattern, &rest, sizeof pattern);
    return float(159 - (pattern >> 23)) * 0.6931472f + 1e-4f;
}

// Result for some successive tokens of a row: their part of the sum of exponentials, and the best token.
template <class A>
struct Drawn {
    A highest;
    double sum;  // of exp(logit - highest)
    double score;
    int64_t token;
};

constexpr int64_t VOCABULARY = 1 << 13;  // tokens of a part: several threads may compute a row's parts

// Ties go to the lowest token. `logits` are scaled, in whole vectors, with minus infinity from `count` on.
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
