// y = x · Wᵀ + b, where W is given as its kept tiles. The sums of a few rows and of the outputs of a tile stay in
// registers over all tiles that lie in one row of tiles: weights stream by once, outputs are written once.
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <immintrin.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>

#ifdef __AVX512F__
#define VECTOR 64        // bytes of a register
#define ACCUMULATORS 24  // registers for sums, of 32
#else
#define VECTOR 32
#define ACCUMULATORS 12  // of 16
#endif

namespace {

using at::Tensor;

constexpr int64_t LANES = 16;        // the outputs of a tile are a multiple of those of the widest register
constexpr int64_t DIRECT = 4;        // rows up to which the inputs are read where they are
constexpr int64_t PADDING = 16;      // elements between copied rows: a power of two would make them share cache lines
constexpr int64_t SERIAL = 1 << 16;  // products up to which one thread is faster than two that wait for each other
constexpr int64_t GROUP = 48;        // rows that a thread computes at a time, a multiple of those in registers

typedef float Floats __attribute__((vector_size(VECTOR)));
typedef double Doubles __attribute__((vector_size(VECTOR)));

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

// How numbers of a type are read, summed and written.
template <typename Type>
struct Number {
    using Sum = Type;
    using Vector = std::conditional_t<sizeof(Type) == 4, Floats, Doubles>;
    static Vector load(const Type* from) {
        Vector vector;
        std::memcpy(&vector, from, sizeof vector);
        return vector;
    }
    static Sum widen(Type number) { return number; }
    static Type narrow(Sum number) { return number; }
};

template <>
struct Number<BFloat16> {
    using Sum = float;
    using Vector = Floats;
    static Vector load(const BFloat16* from) {
        typedef uint16_t Halves __attribute__((vector_size(VECTOR / 2)));
        typedef uint32_t Words __attribute__((vector_size(VECTOR)));
        Halves halves;
        std::memcpy(&halves, from, sizeof halves);
        return (Vector)(__builtin_convertvector(halves, Words) << 16);
    }
    static Sum widen(BFloat16 number) {
        const uint32_t bits = static_cast<uint32_t>(number.bits) << 16;
        Sum sum;
        std::memcpy(&sum, &bits, sizeof sum);
        return sum;
    }
    static BFloat16 narrow(Sum number) {  // to the nearest, ties to even
        uint32_t bits;
        std::memcpy(&bits, &number, sizeof bits);
        const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
        return {static_cast<uint16_t>(number != number ? 0x7FC0 : rounded)};
    }
};

template <>
struct Number<Float16> {
    using Sum = float;
    using Vector = Floats;
    static Vector load(const Float16* from) {
#ifdef __AVX512F__
        return (Vector)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
        return (Vector)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#endif
    }
    static Sum widen(Float16 number) { return _cvtsh_ss(number.bits); }
    static Float16 narrow(Sum number) { return {_cvtss_sh(number, _MM_FROUND_TO_NEAREST_INT)}; }
};

template <typename Type>
struct Layer {
    using Sum = typename Number<Type>::Sum;
    const Type *tiles, *bias;
    const int32_t *pointers, *columns;
    int64_t in_features, out_features, tile_in, tile_out;
    const Sum* inputs;
    int64_t stride;  // of the rows of the inputs
    Type* outputs;
};

// Some rows × WIDE vectors of outputs of one row of tiles.
template <typename Type, int ROWS, int WIDE>
void compute(const Layer<Type>& layer, int64_t row, int64_t tile_row, int64_t panel) {
    using N = Number<Type>;
    using Vector = typename N::Vector;
    constexpr int LANES = sizeof(Vector) / sizeof(typename N::Sum);
    // Sums that do not wait for one another: a register can be added to every few cycles only.
    constexpr int CHAINS = ROWS * WIDE >= 8 ? 1 : 8 / (ROWS * WIDE);
    Vector sums[CHAINS][ROWS][WIDE] = {};
    const auto add = [&](int chain, const Type* weights, const typename N::Sum* inputs) __attribute__((always_inline)) {
        Vector weight[WIDE];
#pragma GCC unroll 8
        for (int w = 0; w < WIDE; w++) weight[w] = N::load(weights + w * LANES);
#pragma GCC unroll 32
        for (int r = 0; r < ROWS; r++) {
            const typename N::Sum input = inputs[r * layer.stride];
#pragma GCC unroll 8
            for (int w = 0; w < WIDE; w++) sums[chain][r][w] += input * weight[w];
        }
    };
    for (int64_t t = layer.pointers[tile_row]; t < layer.pointers[tile_row + 1]; t++) {
        const int64_t start = layer.columns[t] * layer.tile_in;
        const int64_t depth = std::min(layer.tile_in, layer.in_features - start);
        const Type* weights = layer.tiles + t * layer.tile_in * layer.tile_out + panel;
        const auto* inputs = layer.inputs + row * layer.stride + start;
        int64_t k = 0;
        for (; k + CHAINS <= depth; k += CHAINS)
#pragma GCC unroll 8
            for (int c = 0; c < CHAINS; c++) add(c, weights + (k + c) * layer.tile_out, inputs + k + c);
        for (; k < depth; k++) add(0, weights + k * layer.tile_out, inputs + k);
    }
    const int64_t first = tile_row * layer.tile_out + panel;
    const int64_t count = std::min<int64_t>(WIDE * LANES, layer.out_features - first);
#pragma GCC unroll 32
    for (int r = 0; r < ROWS; r++) {
        typename N::Sum total[WIDE * LANES];
#pragma GCC unroll 8
        for (int w = 0; w < WIDE; w++) {
            Vector sum = sums[0][r][w];
#pragma GCC unroll 8
            for (int c = 1; c < CHAINS; c++) sum += sums[c][r][w];
            std::memcpy(total + w * LANES, &sum, sizeof sum);
        }
        Type* to = layer.outputs + (row + r) * layer.out_features + first;
        if (layer.bias)
            for (int64_t i = 0; i < count; i++) to[i] = N::narrow(total[i] + N::widen(layer.bias[first + i]));
        else
            for (int64_t i = 0; i < count; i++) to[i] = N::narrow(total[i]);
    }
}

// All rows from `row` on, as many at a time as fit into registers.
template <typename Type, int ROWS, int WIDE>
void compute_rows(const Layer<Type>& layer, int64_t row, int64_t end, int64_t tile_row, int64_t panel) {
    for (; row + ROWS <= end; row += ROWS) compute<Type, ROWS, WIDE>(layer, row, tile_row, panel);
    if constexpr (ROWS > 1)
        if (row < end) {
            constexpr int FEWER = ROWS > 4 ? 4 : ROWS / 2;
            compute_rows<Type, FEWER, WIDE>(layer, row, end, tile_row, panel);
        }
}

template <typename Type>
void compute_tile_row(const Layer<Type>& layer, int64_t row, int64_t end, int64_t tile_row) {
    constexpr int64_t LANES = VECTOR / sizeof(typename Number<Type>::Sum);
    for (int64_t panel = 0; panel < layer.tile_out;) {
        const int64_t left = (layer.tile_out - panel) / LANES;
        if (left >= 4) {
            compute_rows<Type, ACCUMULATORS / 4, 4>(layer, row, end, tile_row, panel);
            panel += 4 * LANES;
        } else if (left >= 2) {
            compute_rows<Type, ACCUMULATORS / 2, 2>(layer, row, end, tile_row, panel);
            panel += 2 * LANES;
        } else {
            compute_rows<Type, ACCUMULATORS / 2, 1>(layer, row, end, tile_row, panel);
            panel += LANES;
        }
    }
}

// Copies a row, widened to the type of the sums.
template <typename Type>
void copy_row(const Type* inputs, int64_t row, const Layer<Type>& layer, typename Number<Type>::Sum* scratch) {
    const Type* from = inputs + row * layer.in_features;
    auto* to = scratch + row * layer.stride;
    for (int64_t i = 0; i < layer.in_features; i++) to[i] = Number<Type>::widen(from[i]);
}

template <typename Type>
void run(Layer<Type> layer, const Type* inputs, int64_t rows, int threads) {
    using Sum = typename Number<Type>::Sum;
    const int64_t tile_rows = (layer.out_features + layer.tile_out - 1) / layer.tile_out;
    const int64_t products = layer.pointers[tile_rows] * layer.tile_in * layer.tile_out * rows;
    const bool copied = rows > DIRECT || !std::is_same_v<Type, Sum>;
    layer.stride = layer.in_features + (copied ? PADDING : 0);
    const std::unique_ptr<Sum[]> scratch(copied ? new Sum[rows * layer.stride] : nullptr);
    if constexpr (std::is_same_v<Type, Sum>) layer.inputs = inputs;
    if (copied) layer.inputs = scratch.get();
    const int64_t groups = (rows + GROUP - 1) / GROUP;
    if (threads == 1 || products <= SERIAL) {
        for (int64_t row = 0; copied && row < rows; row++) copy_row(inputs, row, layer, scratch.get());
        for (int64_t row = 0; row < rows; row += GROUP)
            for (int64_t t = 0; t < tile_rows; t++) compute_tile_row(layer, row, std::min(rows, row + GROUP), t);
        return;
    }
    // Rows of tiles have unequal numbers of tiles, and threads do not begin at the same time.
    const int64_t chunk = std::max<int64_t>(1, tile_rows * groups / (8 * threads));
#pragma omp parallel num_threads(threads)
    {
        if (copied) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; row++) copy_row(inputs, row, layer, scratch.get());
        }
#pragma omp for schedule(dynamic, chunk) nowait
        for (int64_t i = 0; i < tile_rows * groups; i++) {
            const int64_t row = i % groups * GROUP;
            compute_tile_row(layer, row, std::min(rows, row + GROUP), i / groups);
        }
    }
}

template <typename Type>
void run_typed(const Tensor& inputs, const Tensor& tiles, const Tensor& pointers, const Tensor& columns,
               const std::optional<Tensor>& bias, int64_t out_features, at::TensorBase& outputs, int threads) {
    Layer<Type> layer{};
    layer.tiles = static_cast<const Type*>(tiles.const_data_ptr());
    layer.bias = bias ? static_cast<const Type*>(bias->const_data_ptr()) : nullptr;
    layer.pointers = pointers.const_data_ptr<int32_t>();
    layer.columns = columns.const_data_ptr<int32_t>();
    layer.in_features = inputs.size(-1);
    layer.out_features = out_features;
    layer.tile_in = tiles.size(1);
    layer.tile_out = tiles.size(2);
    layer.outputs = static_cast<Type*>(outputs.mutable_data_ptr());
    const int64_t rows = out_features ? outputs.numel() / out_features : 0;
    if (rows) run(layer, static_cast<const Type*>(inputs.const_data_ptr()), rows, threads);
}

// Rejects what would be read out of bounds.
void check(const Tensor& inputs, const Tensor& tiles, const Tensor& pointers, const Tensor& columns,
           const std::optional<Tensor>& bias, int64_t out_features) {
    TORCH_CHECK(inputs.dim() > 0 && tiles.dim() == 3 && pointers.dim() == 1 && columns.dim() == 1,
                "tile_linear: tiles have 3 dimensions, pointers and columns 1, inputs at least 1");
    TORCH_CHECK(inputs.is_contiguous() && tiles.is_contiguous() && pointers.is_contiguous() &&
                    columns.is_contiguous() && (!bias || bias->is_contiguous()),
                "tile_linear: all tensors must be contiguous");
    TORCH_CHECK(tiles.scalar_type() == inputs.scalar_type() &&
                    (!bias || bias->scalar_type() == inputs.scalar_type()) && pointers.scalar_type() == at::kInt &&
                    columns.scalar_type() == at::kInt,
                "tile_linear: tiles and bias have the dtype of the inputs, pointers and columns are int32");
    const int64_t kept = tiles.size(0), tile_in = tiles.size(1), tile_out = tiles.size(2);
    const int64_t lanes = VECTOR / (inputs.scalar_type() == at::kDouble ? 8 : 4);
    TORCH_CHECK(tile_in > 0 && tile_out > 0 && tile_out % lanes == 0 && columns.size(0) == kept &&
                    pointers.size(0) == (out_features + tile_out - 1) / tile_out + 1 &&
                    (!bias || bias->size(0) == out_features),
                "tile_linear: the tiles do not form a matrix with so many outputs");
    const auto* from = pointers.const_data_ptr<int32_t>();
    const auto* at = columns.const_data_ptr<int32_t>();
    const int64_t count = (inputs.size(-1) + tile_in - 1) / tile_in;
    bool inside = from[0] == 0 && from[pointers.size(0) - 1] == kept;
    for (int64_t i = 1; i < pointers.size(0); i++) inside &= from[i - 1] <= from[i];
    for (int64_t i = 0; i < kept; i++) inside &= at[i] >= 0 && at[i] < count;
    TORCH_CHECK(inside, "tile_linear: pointers or columns lie outside of the matrix");
}

// Not by the operator `empty`, which takes as long as a small layer.
at::TensorBase empty_outputs(const Tensor& inputs, int64_t out_features) {
    at::DimVector shape(inputs.sizes());
    shape.back() = out_features;
    return at::detail::empty_cpu(shape, inputs.scalar_type());
}

// Whether this kernel is the one to run: not where autograd or autocast have something to do, nor for odd tiles.
bool takes(const Tensor& inputs, const Tensor& tiles) {
    if (inputs.requires_grad() && at::GradMode::is_enabled()) return false;
    if (!c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutocastCPU)) return false;
    return inputs.is_floating_point() && tiles.dim() == 3 && tiles.size(2) % LANES == 0;
}

// None where another path must be taken: it is cheaper to ask here than in Python.
std::optional<Tensor> tile_linear(const Tensor& inputs, const Tensor& tiles, const Tensor& pointers,
                                  const Tensor& columns, const std::optional<Tensor>& bias, int64_t out_features) {
    if (!takes(inputs, tiles)) return std::nullopt;
    const auto rows = inputs.expect_contiguous();
    check(*rows, tiles, pointers, columns, bias, out_features);
    at::TensorBase outputs = empty_outputs(*rows, out_features);
    const auto call = [&](auto type) {
        run_typed<decltype(type)>(*rows, tiles, pointers, columns, bias, out_features, outputs, at::get_num_threads());
    };
    switch (inputs.scalar_type()) {
        case at::kDouble: call(double()); break;
        case at::kFloat: call(float()); break;
        case at::kBFloat16: call(BFloat16()); break;
        case at::kHalf: call(Float16()); break;
        default: return std::nullopt;
    }
    return Tensor(std::move(outputs));
}

}  // namespace

TORCH_LIBRARY(sparse_lightning_cpu, library) {
    library.def(
        "tile_linear(Tensor inputs, Tensor tiles, Tensor pointers, Tensor columns, Tensor? bias, int out_features)"
        " -> Tensor?");
}

TORCH_LIBRARY_IMPL(sparse_lightning_cpu, CPU, library) { library.impl("tile_linear", &tile_linear); }
