// N of every M neighbours along the last dimension of several tensors that lie alike: scores, keys, ranks, mask and
// weights of a segment stay in the L1 cache.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int64_t SEGMENT = 512;  // elements: scores, keys, ranks and patterns of small groups fit into the L1 cache

struct Half {
    uint16_t bits;
};

struct BFloat16 {
    uint16_t bits;
};

template <typename To, typename From>
To bits_of(From value) {
    static_assert(sizeof(To) == sizeof(From), "bits are copied");
    To bits;
    std::memcpy(&bits, &value, sizeof(To));
    return bits;
}

// |x| as a score: exact, but for a double that multiplies narrower weights.
template <typename Score>
Score magnitude(double x) {
    return static_cast<Score>(__builtin_fabs(x));
}

template <typename Score>
Score magnitude(float x) {
    return __builtin_fabsf(x);
}

template <typename Score>
Score magnitude(BFloat16 x) {
    return bits_of<float>(uint32_t(x.bits & 0x7FFF) << 16);
}

// Exponents of subnormal numbers are found by a product; those of infinity and NaN are all ones.
template <typename Score>
Score magnitude(Half x) {
    const uint32_t shifted = uint32_t(x.bits & 0x7FFF) << 13, special = shifted >= 0x0F800000u ? 0x7F800000u : 0u;
    return bits_of<float>(bits_of<uint32_t>(bits_of<float>(shifted) * 0x1p112f) | special);
}

// A contiguous segment has a loop of its own, which the compiler turns into vectors.
template <typename Action>
void each(int64_t count, int64_t step, const Action& action) {
    if (step == 1)
        for (int64_t i = 0; i < count; i++) action(i, i);
    else
        for (int64_t i = 0; i < count; i++) action(i, i * step);
}

template <typename Element, typename Score>
void load(const char* elements, int64_t step, Score* __restrict scores, int64_t count) {
    const auto* from = reinterpret_cast<const Element*>(elements);
    each(count, step, [=](int64_t i, int64_t at) { scores[i] = magnitude<Score>(from[at]); });
}

template <typename Element, typename Score>
void multiply(const char* elements, int64_t step, Score* __restrict scores, int64_t count) {
    const auto* from = reinterpret_cast<const Element*>(elements);
    each(count, step, [=](int64_t i, int64_t at) { scores[i] *= magnitude<Score>(from[at]); });
}

// The key of a weight that stays pruned: below that of NaN.
constexpr int GONE = -2;

// The bits of a score, read as an integer, are in the order of the scores; −1 ranks NaN below all.
template <typename Key, typename Score>
Key key_of(Score score) {
    const Key bits = bits_of<Key>(score) & std::numeric_limits<Key>::max();
    return bits > bits_of<Key>(std::numeric_limits<Score>::infinity()) ? Key(-1) : bits;
}

// Without a factor, keys are made of the weights as they are read.
template <typename Element, typename Score, typename Key>
void load_keys(const char* elements, int64_t step, Key* __restrict keys, int64_t count) {
    const auto* from = reinterpret_cast<const Element*>(elements);
    each(count, step, [=](int64_t i, int64_t at) { keys[i] = key_of<Key>(magnitude<Score>(from[at])); });
}

// Work space of a thread. Key d places before or after element i is of the same group where same[m - 1 ± d][i] is 1.
template <typename Score, typename Key>
struct Scratch {
    int64_t m, length;
    std::vector<Score> scores;
    std::vector<Key> keys, rank, same;

    explicit Scratch(int64_t m)
        : m(m), length(std::max<int64_t>(1, SEGMENT / m) * m), scores(length), keys(length + 2 * m), rank(length),
          same(2 * m * length) {
        for (int64_t d = 1 - m; d < m; d++)
            for (int64_t i = 0; i < length; i++) {
                const int64_t place = i % m + d;
                same[(m - 1 + d) * length + i] = place >= 0 && place < m;
            }
    }

    Key* first_key() { return keys.data() + m; }

    void make_keys(int64_t count) {
        const Score* __restrict from = scores.data();
        Key* __restrict key = first_key();
        for (int64_t i = 0; i < count; i++) key[i] = key_of<Key>(from[i]);
    }

    void mark_gone(const bool* pruned, int64_t step, int64_t count) {
        Key* const key = first_key();
        each(count, step, [=](int64_t i, int64_t at) { key[i] = pruned[at] ? Key(GONE) : key[i]; });
    }

    // What is gone ranks last, also in groups that have fewer others than are kept.
    void rank_gone_last(int64_t count) {
        const Key* const key = first_key();
        Key* __restrict ranks = rank.data();
        for (int64_t i = 0; i < count; i++) ranks[i] = key[i] == Key(GONE) ? Key(m) : ranks[i];
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

    template <typename Bits>
    void write(Bits* weights, int64_t step, bool* mask, int64_t mask_step, int64_t count, Key kept) const {
        const Key* __restrict ranks = rank.data();
        if (step == 1)
            for (int64_t i = 0; i < count; i++) weights[i] = ranks[i] >= kept ? Bits(0) : weights[i];
        else
            for (int64_t i = 0; i < count; i++)
                if (ranks[i] >= kept) weights[i * step] = 0;
        each(count, mask_step, [=](int64_t i, int64_t at) { mask[at] = ranks[i] >= kept; });
    }
};

// A tensor of each kind: weights, others and masks have their own strides, in elements, the last dimension included.
struct Rows {
    int64_t dims;
    const int64_t *sizes, *strides;
    int64_t width;  // bytes of an element

    int64_t step() const { return strides[dims - 1]; }

    // The bytes from the first element of a tensor to element `start` of a row.
    int64_t offset(int64_t row, int64_t start) const {
        int64_t elements = start * step();
        for (int64_t d = dims - 2; d >= 0; d--) {
            elements += row % sizes[d] * strides[d];
            row /= sizes[d];
        }
        return elements * width;
    }
};

template <typename Value>
using Read = void (*)(const char*, int64_t, Value* __restrict, int64_t);

enum Type { HALF, BFLOAT16, FLOAT, DOUBLE };

template <typename Score>
Read<Score> loader(int type) {
    return type == HALF ? load<Half, Score> : type == BFLOAT16 ? load<BFloat16, Score> : load<Score, Score>;
}

template <typename Score, typename Key>
Read<Key> key_loader(int type) {
    return type == HALF       ? load_keys<Half, Score, Key>
           : type == BFLOAT16 ? load_keys<BFloat16, Score, Key>
                              : load_keys<Score, Score, Key>;
}

template <typename Score>
Read<Score> multiplier(int type) {
    return type == HALF       ? multiply<Half, Score>
           : type == BFLOAT16 ? multiply<BFloat16, Score>
           : type == FLOAT    ? multiply<float, Score>
                              : multiply<double, Score>;
}

int64_t width_of(int type) { return type == DOUBLE ? 8 : type == FLOAT ? 4 : 2; }

// Key has at least 32 bits: the compiler does not vectorize narrower sums.
template <typename Score, typename Key, typename Bits>
void select(int64_t tensors, char* const* weights, int type, const char* const* others, int other_type,
            const char* const* pruned, bool* masks, int64_t dims, const int64_t* sizes, const int64_t* strides,
            const int64_t* kept, int64_t m, int threads) {
    const Rows weight{dims, sizes, strides, width_of(type)}, mask{dims, sizes, strides + dims, 1},
        other{dims, sizes, strides + 2 * dims, width_of(other_type)}, gone{dims, sizes, strides + 3 * dims, 1};
    const Read<Score> read = loader<Score>(type), times = multiplier<Score>(other_type);
    const Read<Key> read_keys = key_loader<Score, Key>(type);
    const int64_t length = sizes[dims - 1];
    int64_t rows = 1;
    for (int64_t d = 0; d < dims - 1; d++) rows *= sizes[d];
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Scratch<Score, Key> scratch(m);
        const int64_t pieces = (length + scratch.length - 1) / scratch.length;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < tensors * rows * pieces; i++) {
            const int64_t tensor = i / (rows * pieces), row = i / pieces % rows, start = i % pieces * scratch.length;
            const int64_t count = std::min(scratch.length, length - start);
            char* const here = weights[tensor] + weight.offset(row, start);
            if (others) {
                read(here, weight.step(), scratch.scores.data(), count);
                times(others[tensor] + other.offset(row, start), other.step(), scratch.scores.data(), count);
                scratch.make_keys(count);
            } else {
                read_keys(here, weight.step(), scratch.first_key(), count);
            }
            if (pruned) {
                const char* const there = pruned[tensor] + gone.offset(row, start);
                scratch.mark_gone(reinterpret_cast<const bool*>(there), gone.step(), count);
            }
            scratch.rank_keys(count);
            if (pruned) scratch.rank_gone_last(count);
            scratch.write(reinterpret_cast<Bits*>(here), weight.step(),
                          masks + tensor * rows * length + mask.offset(row, start), mask.step(), count,
                          Key(kept[tensor]));
        }
    }
}

}  // namespace

// weights and others: the address of each tensor, and the type of their elements; others may be null.
// pruned: the address of what stays pruned of each tensor, or null. masks: one after the other. strides: those of
// weights, masks, others and pruned. kept: of each group, for each tensor.
extern "C" void nm_select(int64_t tensors, char* const* weights, int type, const char* const* others, int other_type,
                          const char* const* pruned, bool* masks, int64_t dims, const int64_t* sizes,
                          const int64_t* strides, const int64_t* kept, int64_t m, int threads) {
    const auto run = type == DOUBLE  ? select<double, int64_t, int64_t>
                     : type == FLOAT ? select<float, int32_t, int32_t>
                                     : select<float, int32_t, int16_t>;
    run(tensors, weights, type, others, other_type, pruned, masks, dims, sizes, strides, kept, m, threads);
}
