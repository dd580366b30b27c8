// N of every M neighbours along the last dimension: keys, ranks, mask and weights of a segment stay in the L1 cache.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

constexpr int64_t SEGMENT = 512;  // elements: keys, ranks and patterns of small groups fit into the L1 cache

// Rows of the last dimension of a tensor; strides in elements.
struct Rows {
    const int64_t* strides;  // of the leading dimensions
    int64_t step;            // of the last one
};

int64_t offset_of(int64_t row, int64_t dims, const int64_t* sizes, const Rows& rows) {
    int64_t offset = 0;
    for (int64_t d = dims - 1; d >= 0; d--) {
        offset += row % sizes[d] * rows.strides[d];
        row /= sizes[d];
    }
    return offset;
}

// Work space of a thread. Key d places before or after element i is of the same group where same[m - 1 ± d][i] is 1.
template <typename Key>
struct Scratch {
    int64_t m, length;
    std::vector<Key> keys, rank, same;

    explicit Scratch(int64_t m)
        : m(m), length(std::max<int64_t>(1, SEGMENT / m) * m), keys(length + 2 * m), rank(length), same(2 * m * length) {
        for (int64_t d = 1 - m; d < m; d++)
            for (int64_t i = 0; i < length; i++) {
                const int64_t place = i % m + d;
                same[(m - 1 + d) * length + i] = place >= 0 && place < m;
            }
    }

    // How many of its group rank before each key: larger ones, and equal ones with a lower index.
    void rank_keys(int64_t count) {
        const Key* key = keys.data() + m;
        Key* __restrict ranks = rank.data();
        std::fill(rank.begin(), rank.end(), Key(0));
        for (int64_t d = 1; d < m; d++) {
            const Key* __restrict before = same.data() + (m - 1 - d) * length;
            const Key* __restrict after = same.data() + (m - 1 + d) * length;
#pragma omp simd
            for (int64_t i = 0; i < count; i++)
                ranks[i] += (key[i - d] >= key[i] ? before[i] : Key(0)) + (key[i + d] > key[i] ? after[i] : Key(0));
        }
    }
};

// The bits of |x|, read as an integer, are in the order of |x|; −1 ranks NaN below all.
template <typename Score, typename Key>
Key key_of(Score bits, Key infinity) {
    const Key magnitude = bits & std::numeric_limits<Score>::max();
    return magnitude > infinity ? Key(-1) : magnitude;
}

// A contiguous segment has a loop of its own, which the compiler turns into vectors.
template <typename Bits, typename Score, typename Key>
void select_segment(Scratch<Key>& scratch, Bits* weights, int64_t step, const Score* scores, int64_t score_step,
                    bool* mask, int64_t mask_step, int64_t count, Key infinity, Key kept) {
    Key* __restrict keys = scratch.keys.data() + scratch.m;
    if (score_step == 1)
        for (int64_t i = 0; i < count; i++) keys[i] = key_of(scores[i], infinity);
    else
        for (int64_t i = 0; i < count; i++) keys[i] = key_of(scores[i * score_step], infinity);
    scratch.rank_keys(count);
    const Key* __restrict ranks = scratch.rank.data();
    if (step == 1)
        for (int64_t i = 0; i < count; i++) weights[i] = ranks[i] >= kept ? Bits(0) : weights[i];
    else
        for (int64_t i = 0; i < count; i++)
            if (ranks[i] >= kept) weights[i * step] = 0;
    if (mask_step == 1)
        for (int64_t i = 0; i < count; i++) mask[i] = ranks[i] >= kept;
    else
        for (int64_t i = 0; i < count; i++) mask[i * mask_step] = ranks[i] >= kept;
}

template <typename Key, typename Bits, typename Score>
void select(Bits* weights, Rows weight, const Score* scores, Rows score, bool* pruned, Rows mask, int64_t dims,
            const int64_t* sizes, int64_t length, int64_t n, int64_t m, Key infinity, int threads) {
    int64_t rows = 1;
    for (int64_t d = 0; d < dims; d++) rows *= sizes[d];
#pragma omp parallel num_threads(threads)
    {
        Scratch<Key> scratch(m);
        const int64_t pieces = (length + scratch.length - 1) / scratch.length;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows * pieces; i++) {
            const int64_t row = i / pieces, start = i % pieces * scratch.length;
            select_segment(scratch, weights + offset_of(row, dims, sizes, weight) + start * weight.step, weight.step,
                           scores + offset_of(row, dims, sizes, score) + start * score.step, score.step,
                           pruned + offset_of(row, dims, sizes, mask) + start * mask.step, mask.step,
                           std::min(scratch.length, length - start), infinity, Key(n));
        }
    }
}

}  // namespace

// Weights and scores are the bits of floats of `width` and `key_width` bytes, 2, 4 or 8. `strides` has for each of
// weights, scores and mask one entry per dimension, the last one included.
extern "C" void nm_select(void* weights, int64_t width, const void* scores, int64_t key_width, bool* mask,
                          int64_t dims, const int64_t* sizes, const int64_t* strides, int64_t n, int64_t m,
                          int64_t infinity, int threads) {
    const int64_t outer = dims - 1, length = sizes[outer];
    const Rows weight{strides, strides[outer]}, score{strides + dims, strides[dims + outer]},
        pruned{strides + 2 * dims, strides[2 * dims + outer]};
    const auto run = [&](auto* bits, const auto* keys, auto top) {
        using Key = decltype(top);  // at least 32 bits: the compiler does not vectorize narrower sums
        select<Key>(bits, weight, keys, score, mask, pruned, outer, sizes, length, n, m, top, threads);
    };
    const auto top = static_cast<int32_t>(infinity);
    if (width == 2 && key_width == 2) run(static_cast<int16_t*>(weights), static_cast<const int16_t*>(scores), top);
    if (width == 2 && key_width == 4) run(static_cast<int16_t*>(weights), static_cast<const int32_t*>(scores), top);
    if (width == 4) run(static_cast<int32_t*>(weights), static_cast<const int32_t*>(scores), top);
    if (width == 8) run(static_cast<int64_t*>(weights), static_cast<const int64_t*>(scores), infinity);
}
