// The k highest scores of each row: a histogram of the leading bits finds the bin of the lowest score that is kept, the
// scores of that bin alone are searched, and one pass compares all scores with it. Short rows are one bin.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

namespace {

constexpr int BITS = 11, SHIFT = 32 - BITS;  // 2048 counters fit into the L1 cache
constexpr int64_t BINS = int64_t(1) << BITS;
constexpr int64_t SHORT = BINS;  // scores of a row up to which all are searched: clearing counters would take longer

// Unsigned integers in the order of the floats: zeros are equal, and NaN is lowest.
inline uint32_t key_of(uint32_t bits) {
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t negative = 0u - (bits >> 31);
    const uint32_t key = bits ^ (negative | 0x80000000u);
    return magnitude > 0x7f800000u ? 0u : magnitude == 0 ? 0x80000000u : key;
}

// A contiguous part of a row, which one thread works on.
struct Piece {
    int64_t begin, end;
    std::vector<int64_t> counts;
    std::vector<uint32_t> bin;  // keys of the bin with the lowest score that is kept
    int64_t ties = 0;           // equal to that score, to be kept: the first ones

    void take_all(const uint32_t* row) {
        bin.resize(end - begin);
        std::transform(row + begin, row + end, bin.begin(), key_of);
    }

    void count(const uint32_t* row) {
        counts.assign(4 * BINS, 0);  // four counters each: neighbours with one key would wait for each other
        int64_t i = begin;
        for (; i + 4 <= end; i += 4)
            for (int lane = 0; lane < 4; lane++) counts[lane * BINS + (key_of(row[i + lane]) >> SHIFT)]++;
        for (; i < end; i++) counts[key_of(row[i]) >> SHIFT]++;
        for (int64_t b = 0; b < BINS; b++)
            counts[b] += counts[BINS + b] + counts[2 * BINS + b] + counts[3 * BINS + b];
    }

    void collect(const uint32_t* row, uint32_t wanted) {
        bin.resize(counts[wanted] + 1);  // one more: each key is written, and only those of the bin are counted
        int64_t found = 0;
        for (int64_t i = begin; i < end; i++) {
            const uint32_t key = key_of(row[i]);
            bin[found] = key;
            found += key >> SHIFT == wanted;
        }
        bin.pop_back();
    }

    void write(const uint32_t* row, uint32_t lowest, bool* mask) const {
        for (int64_t i = begin; i < end; i++) mask[i] = key_of(row[i]) < lowest;
        const int64_t equal = std::count(bin.begin(), bin.end(), lowest);
        for (int64_t i = begin, seen = 0; seen < equal && equal > ties; i++)
            if (key_of(row[i]) == lowest) mask[i] = seen++ >= ties;
    }
};

void select_row(const uint32_t* row, int64_t length, int64_t keep, bool* mask, int threads) {
    if (keep <= 0 || keep >= length) {
        std::fill(mask, mask + length, keep <= 0);
        return;
    }
    if (length <= SHORT) threads = 1;
    std::vector<Piece> pieces(threads);
    for (int t = 0; t < threads; t++) pieces[t] = {length * t / threads, length * (t + 1) / threads, {}, {}, 0};
    const auto each = [&](const auto& action) {
        if (threads == 1) return action(pieces[0]);
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int t = 0; t < threads; t++) action(pieces[t]);
    };
    int64_t left = keep;  // to be kept of the bin
    if (length <= SHORT) {
        pieces[0].take_all(row);
    } else {
        each([&](Piece& piece) { piece.count(row); });
        uint32_t wanted = BINS - 1;
        for (;; wanted--) {
            int64_t count = 0;
            for (const Piece& piece : pieces) count += piece.counts[wanted];
            if (count >= left) break;
            left -= count;
        }
        each([&](Piece& piece) { piece.collect(row, wanted); });
    }
    std::vector<uint32_t> all;
    for (const Piece& piece : pieces) all.insert(all.end(), piece.bin.begin(), piece.bin.end());
    std::nth_element(all.begin(), all.begin() + (left - 1), all.end(), std::greater<uint32_t>());
    const uint32_t lowest = all[left - 1];
    int64_t ties = left - std::count_if(all.begin(), all.end(), [&](uint32_t key) { return key > lowest; });
    for (Piece& piece : pieces) {
        const int64_t equal = std::count(piece.bin.begin(), piece.bin.end(), lowest);
        piece.ties = std::min(ties, equal);
        ties -= piece.ties;
    }
    each([&](const Piece& piece) { piece.write(row, lowest, mask); });
}

}  // namespace

// The bits of fp32 scores, `rows` of `length`; the number to keep of each row; the mask, true where it is not kept.
extern "C" void rank_select(const uint32_t* scores, const int64_t* keep, bool* mask, int64_t rows, int64_t length,
                            int threads) {
    const auto row = [&](int64_t i, int team) {
        select_row(scores + i * length, length, keep[i], mask + i * length, team);
    };
    if (rows >= threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
        for (int64_t i = 0; i < rows; i++) row(i, 1);
    } else {
        for (int64_t i = 0; i < rows; i++) row(i, threads);  // not in a region of one thread: it would start new teams
    }
}
