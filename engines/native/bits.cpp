// Weights as integers: checksums over logical elements, and which elements differ. `bits.py` calls it.
#include <cstdint>
#include <cstring>

namespace {

// The sum of each element, with its sign, times its row's key and its column's, modulo 2^64.
template <class T>
uint64_t checksum(const T* elements, int64_t rows, int64_t columns, const uint64_t* row_keys,
                  const uint64_t* column_keys, int64_t threads) {
    uint64_t total = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : total) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row) {
        const T* mine = elements + row * columns;
        uint64_t sum = 0;
        for (int64_t column = 0; column < columns; ++column) {
            sum += static_cast<uint64_t>(static_cast<int64_t>(mine[column])) * column_keys[column];
        }
        total += sum * row_keys[row];
    }
    return total;
}

// Writes where the arrays differ, and by how much; returns how many places that are. Most words of 8 bytes are equal.
template <class T>
int64_t changes(const T* bits, const T* base, int64_t count, int64_t* positions, T* differences) {
    constexpr int64_t lanes = sizeof(uint64_t) / sizeof(T);
    int64_t found = 0;
    const auto compare = [&](int64_t at) {  // without a branch; what is written for an equal place is overwritten
        positions[found] = at;
        differences[found] = static_cast<T>(bits[at] - base[at]);
        found += bits[at] != base[at];
    };
    int64_t at = 0;
    for (; at + lanes <= count; at += lanes) {
        uint64_t one, other;
        std::memcpy(&one, bits + at, sizeof one);
        std::memcpy(&other, base + at, sizeof other);
        if (one != other) {
            for (int64_t lane = 0; lane < lanes; ++lane) compare(at + lane);
        }
    }
    for (; at < count; ++at) compare(at);
    return found;
}

}  // namespace

#define CHECKSUM(NAME, T)                                                                                          \
    extern "C" uint64_t NAME(const T* elements, int64_t rows, int64_t columns, const uint64_t* row_keys,           \
                             const uint64_t* column_keys, int64_t threads) {                                       \
        return checksum(elements, rows, columns, row_keys, column_keys, threads);                                  \
    }
#define CHANGES(NAME, T)                                                                                           \
    extern "C" int64_t NAME(const T* bits, const T* base, int64_t count, int64_t* positions, T* differences) {     \
        return changes(bits, base, count, positions, differences);                                                 \
    }

CHECKSUM(checksum_2, int16_t)
CHECKSUM(checksum_4, int32_t)
CHECKSUM(checksum_8, int64_t)
CHANGES(changes_2, uint16_t)
CHANGES(changes_4, uint32_t)
