// One build of the kernels, for the instruction set that the compiler's flags and RECMILL_TARGET name.
//
// Everything here has internal linkage, and no function of the standard library is called: the linker keeps one copy of an
// inline function, and it might keep one with instructions that the CPU at hand does not have.
#include "kernels.hpp"

#define RECMILL_INLINE inline __attribute__((always_inline))

namespace dense {
namespace {

// ROWS x VECTORS accumulators, one row of VECTORS weights and one broadcast value have to fit the registers.
#if defined(__AVX512F__)
constexpr size_t LANES = 16;  // 32 registers
constexpr int ROWS = 14, VECTORS = 2;
#elif defined(__AVX2__)
constexpr size_t LANES = 8;  // 16 registers
constexpr int ROWS = 6, VECTORS = 2;
#elif defined(__aarch64__)
constexpr size_t LANES = 4;  // 32 registers
constexpr int ROWS = 6, VECTORS = 4;
#else
constexpr size_t LANES = 4;  // 16 registers, and products need one of their own
constexpr int ROWS = 4, VECTORS = 2;
#endif

// Rows of a group where the number of rows is a panel's: a power of two, so that none is left over.
constexpr int REPEATED_ROWS = ROWS >= 8 ? 8 : 4;

typedef float Vector __attribute__((vector_size(LANES * sizeof(float))));
typedef float Unaligned __attribute__((vector_size(LANES * sizeof(float)), aligned(alignof(float)), may_alias));

RECMILL_INLINE Vector load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
RECMILL_INLINE void store(float* to, Vector value) { *reinterpret_cast<Unaligned*>(to) = value; }
RECMILL_INLINE size_t least(size_t a, size_t b) { return a < b ? a : b; }

// A vector of which the first `count` floats are in memory: without WHOLE there may be fewer than LANES, the rest is 0.
template <bool WHOLE>
RECMILL_INLINE Vector load_some(const float* from, size_t count) {
  if (WHOLE || count >= LANES) return load(from);
  Vector value{};
  __builtin_memcpy(&value, from, count * sizeof(float));
  return value;
}

template <bool WHOLE>
RECMILL_INLINE void store_some(float* to, Vector value, size_t count) {
  if (WHOLE || count >= LANES) store(to, value);
  else __builtin_memcpy(to, &value, count * sizeof(float));
}

template <int VALUE>
struct Constant {
  static constexpr int value = VALUE;
};

// run(Constant<vectors>, Constant<whole>, column) for each panel: as wide as registers allow, and a narrower one for the
// rest, whose last vector may not be whole.
template <int WIDEST, class Run>
RECMILL_INLINE void for_panels(size_t columns, size_t column, Run& run) {
  for (; column + WIDEST * LANES <= columns; column += WIDEST * LANES) run(Constant<WIDEST>{}, Constant<true>{}, column);
  if (column + (WIDEST - 1) * LANES < columns) run(Constant<WIDEST>{}, Constant<false>{}, column);
  else if constexpr (WIDEST > 1) for_panels<WIDEST - 1>(columns, column, run);
}

// run(Constant<rows>, row) for each group of rows that one kernel takes: the largest first, then halves for the rest.
template <int MOST, class Run>
RECMILL_INLINE void for_groups(size_t rows, size_t row, Run& run) {
  for (; row + MOST <= rows; row += MOST) run(Constant<MOST>{}, row);
  if constexpr (MOST > 1) for_groups<MOST / 2>(rows, row, run);
}

// done(i, j, sums) for vector j of row i: the sum over k of a(i, k) * b[k][vector j].
// BY_ROW: a(i, k) = a[i * a_stride + k]; else a[k * a_stride + i].
template <int M, int N, bool BY_ROW, class Done>
RECMILL_INLINE void multiply(size_t depth, const float* __restrict a, size_t a_stride, const float* __restrict b,
                             size_t b_stride, Done done) {
  Vector sums[M][N];
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) sums[i][j] = Vector{};
  // Three rows share one pointer (p, p + stride, p + 2 stride): a pointer for each would not fit the registers.
  const float* base[(M + 2) / 3];
#pragma GCC unroll 8
  for (int g = 0; g < (M + 2) / 3; ++g) base[g] = a + 3 * g * a_stride;
#pragma GCC unroll 4
  for (size_t k = 0; k < depth; ++k) {
    Vector row[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) row[j] = load(b + j * LANES);
    b += b_stride;
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      const float value = BY_ROW ? base[i / 3][(i % 3) * a_stride + k] : a[k * a_stride + i];
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) sums[i][j] += value * row[j];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) done(i, j, sums[i][j]);
}

RECMILL_INLINE size_t whole_vectors(size_t columns) { return (columns + LANES - 1) / LANES * LANES; }

size_t packed_size(size_t k, size_t n) { return k * whole_vectors(n); }

void pack(const float* weights, size_t k_stride, size_t n_stride, size_t k, size_t n, float* packed) {
  constexpr size_t SQUARE = 16;  // rows that are transposed at once, so that what is read stays in the first cache
  auto pack_panel = [&](auto vectors, auto whole, size_t column) {
    constexpr size_t WIDTH = decltype(vectors)::value * LANES;
    const size_t used = decltype(whole)::value ? WIDTH : n - column;
    const float* from = weights + column * n_stride;
    if (n_stride == 1) {
      for (size_t row = 0; row < k; ++row)
        for (size_t c = 0; c < WIDTH; ++c) packed[row * WIDTH + c] = c < used ? from[row * k_stride + c] : 0.0f;
    } else {
      for (size_t begin = 0; begin < k; begin += SQUARE)
        for (size_t c = 0; c < WIDTH; ++c)
          for (size_t row = begin; row < least(k, begin + SQUARE); ++row)
            packed[row * WIDTH + c] = c < used ? from[row * k_stride + c * n_stride] : 0.0f;
    }
    packed += k * WIDTH;
  };
  for_panels<VECTORS>(n, 0, pack_panel);
}

// Asks for ROWS x VECTORS of a matrix that will be read or written when a product is done: it may not be in the cache.
template <int M, int N>
RECMILL_INLINE void fetch(const float* matrix, size_t stride) {
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < N; ++j) __builtin_prefetch(matrix + i * stride + j * LANES, 1);
}

// x[rows][k] w[k][n]; done(whole, row, column, sums) is given each vector of the product, and reads or writes `later`.
template <class Done>
RECMILL_INLINE void product(size_t rows, size_t k, size_t n, const float* x, size_t x_stride, const float* packed,
                            const float* later, size_t later_stride, Done done) {
  auto multiply_panel = [&](auto vectors, auto whole, size_t column) {
    constexpr int WIDE = decltype(vectors)::value;
    auto multiply_group = [&](auto group, size_t row) {
      if (later) fetch<decltype(group)::value, WIDE>(later + row * later_stride + column, later_stride);
      multiply<decltype(group)::value, WIDE, true>(
          k, x + row * x_stride, x_stride, packed + column * k, WIDE * LANES,
          [&](int i, int j, Vector sums) __attribute__((always_inline)) {
            done(whole, row + i, column + j * LANES, sums);
          });
    };
    for_groups<ROWS>(rows, 0, multiply_group);
  };
  for_panels<VECTORS>(n, 0, multiply_panel);
}

void forward(size_t rows, size_t k, size_t n, const float* x, size_t x_stride, const float* packed, const float* bias,
             bool relu, float* y, size_t y_stride) {
  product(rows, k, n, x, x_stride, packed, y, y_stride,
          [&](auto whole, size_t row, size_t column, Vector sums) __attribute__((always_inline)) {
            constexpr bool WHOLE = decltype(whole)::value;
            sums += load_some<WHOLE>(bias + column, n - column);
            if (relu) sums = sums < Vector{} ? Vector{} : sums;
            store_some<WHOLE>(y + row * y_stride + column, sums, n - column);
          });
}

void input_grad(size_t rows, size_t k, size_t n, const float* y_grad, size_t y_stride, const float* packed, const float* x,
                size_t x_stride, float* x_grad, size_t x_grad_stride) {
  product(rows, k, n, y_grad, y_stride, packed, x, x_stride,
          [&](auto whole, size_t row, size_t column, Vector sums) __attribute__((always_inline)) {
            constexpr bool WHOLE = decltype(whole)::value;
            if (x) sums = load_some<WHOLE>(x + row * x_stride + column, n - column) > Vector{} ? sums : Vector{};
            store_some<WHOLE>(x_grad + row * x_grad_stride + column, sums, n - column);
          });
}

void weight_grad(size_t rows, size_t in, size_t out, const float* y_grad, size_t y_stride, const float* x, size_t x_stride,
                 bool add, float* w_grad, size_t w_stride) {
  // A panel of x is copied first: its rows are on as many pages, which is more than the CPU has at hand.
  constexpr size_t MOST_ROWS = 256;
  alignas(64) float panel[MOST_ROWS * VECTORS * LANES];
  auto multiply_panel = [&](auto vectors, auto whole, size_t column) {
    constexpr bool WHOLE = decltype(whole)::value;
    constexpr int WIDE = decltype(vectors)::value;
    const size_t depth = least(rows, MOST_ROWS);
    for (size_t row = 0; row < depth; ++row)
      for (int j = 0; j < WIDE; ++j) {
        const size_t at = column + j * LANES;
        store(panel + (row * WIDE + j) * LANES, load_some<WHOLE>(x + row * x_stride + at, in - at));
      }
    auto multiply_group = [&](auto group, size_t first) {
      fetch<decltype(group)::value, WIDE>(w_grad + first * w_stride + column, w_stride);
      multiply<decltype(group)::value, WIDE, false>(
          depth, y_grad + first, y_stride, panel, WIDE * LANES,
          [&](int i, int j, Vector sums) __attribute__((always_inline)) {
            const size_t at = column + j * LANES;
            float* to = w_grad + (first + i) * w_stride + at;
            if (add) sums += load_some<WHOLE>(to, in - at);
            store_some<WHOLE>(to, sums, in - at);
          });
    };
    for_groups<ROWS>(out, 0, multiply_group);
  };
  for (;; add = true) {
    for_panels<VECTORS>(in, 0, multiply_panel);
    if (rows <= MOST_ROWS) return;
    rows -= MOST_ROWS;
    x += MOST_ROWS * x_stride;
    y_grad += MOST_ROWS * y_stride;
  }
}

void bias_grad(size_t rows, size_t out, const float* y_grad, size_t y_stride, bool add, float* b_grad) {
  auto sum_panel = [&](auto vectors, auto whole, size_t column) {
    constexpr bool WHOLE = decltype(whole)::value;
    constexpr int WIDE = decltype(vectors)::value;
    Vector sums[WIDE];
    for (int j = 0; j < WIDE; ++j) {
      const size_t at = column + j * LANES;
      sums[j] = add ? load_some<WHOLE>(b_grad + at, out - at) : Vector{};
    }
    for (size_t row = 0; row < rows; ++row)
      for (int j = 0; j < WIDE; ++j) {
        const size_t at = column + j * LANES;
        sums[j] += load_some<WHOLE>(y_grad + row * y_stride + at, out - at);
      }
    for (int j = 0; j < WIDE; ++j) {
      const size_t at = column + j * LANES;
      store_some<WHOLE>(b_grad + at, sums[j], out - at);
    }
  };
  for_panels<4>(out, 0, sum_panel);
}

// What the vectors of some repeated columns give, [num_vectors][columns of a panel] for each of them.
struct Tiles {
  const uint32_t* index[REPEATED_TOGETHER];
  float* values[REPEATED_TOGETHER];
};

template <int PARTS, class TileWidth>
RECMILL_INLINE Tiles tiles_of(const RepeatedColumns* parts, float* scratch, TileWidth) {
  Tiles tiles;
  for (int p = 0; p < PARTS; ++p) {
    tiles.index[p] = parts[p].index;
    tiles.values[p] = scratch;
    scratch += parts[p].num_vectors * TileWidth::value;
  }
  return tiles;
}

void forward_repeated(size_t rows, size_t k, size_t n, const RepeatedColumns* parts, size_t num_parts, const float* packed,
                      const float* bias, float* scratch, float* y, size_t y_stride) {
  auto add_panel = [&](auto vectors, auto whole, size_t column) {
    constexpr int WIDE = decltype(vectors)::value;
    constexpr bool WHOLE = decltype(whole)::value;
    constexpr size_t WIDTH = WIDE * LANES;
    auto add_parts = [&](auto group, size_t first) {
      constexpr int PARTS = decltype(group)::value;
      const Tiles tiles = tiles_of<PARTS>(parts + first, scratch, Constant<WIDTH>{});
      for (int p = 0; p < PARTS; ++p) {
        const RepeatedColumns& part = parts[first + p];
        const size_t stride = vector_stride(part.width);
        auto multiply_group = [&](auto size, size_t row) {
          multiply<decltype(size)::value, WIDE, true>(
              part.width, part.vectors + row * stride, stride, packed + column * k + part.begin * WIDTH, WIDTH,
              [&](int i, int j, Vector sums) __attribute__((always_inline)) {
                store(tiles.values[p] + (row + i) * WIDTH + j * LANES, sums);
              });
        };
        for_groups<ROWS>(part.num_vectors, 0, multiply_group);
      }
      for (size_t row = 0; row < rows; ++row) {
        const float* from = first == 0 ? bias + column : y + row * y_stride + column;
        for (int j = 0; j < WIDE; ++j) {
          const size_t at = j * LANES, count = n - column - at;
          Vector sums = load_some<WHOLE>(from + at, count);
#pragma GCC unroll 4
          for (int p = 0; p < PARTS; ++p) sums += load(tiles.values[p] + tiles.index[p][row] * WIDTH + at);
          store_some<WHOLE>(y + row * y_stride + column + at, sums, count);
        }
      }
    };
    for_groups<REPEATED_TOGETHER>(num_parts, 0, add_parts);
  };
  for_panels<VECTORS>(n, 0, add_panel);
}

void forward_add(size_t rows, size_t first, size_t count, size_t k, size_t n, const float* x, size_t x_stride,
                 const float* packed, bool relu, float* y, size_t y_stride) {
  auto multiply_panel = [&](auto vectors, auto whole, size_t column) {
    constexpr int WIDE = decltype(vectors)::value;
    constexpr bool WHOLE = decltype(whole)::value;
    auto multiply_group = [&](auto group, size_t row) {
      multiply<decltype(group)::value, WIDE, true>(
          count, x + row * x_stride, x_stride, packed + column * k + first * WIDE * LANES, WIDE * LANES,
          [&](int i, int j, Vector sums) __attribute__((always_inline)) {
            const size_t at = column + j * LANES;
            float* to = y + (row + i) * y_stride + at;
            sums += load_some<WHOLE>(to, n - at);
            if (relu) sums = sums < Vector{} ? Vector{} : sums;
            store_some<WHOLE>(to, sums, n - at);
          });
    };
    for_groups<ROWS>(rows, 0, multiply_group);
  };
  for_panels<VECTORS>(n, 0, multiply_panel);
}

// What one panel of y_grad, columns [column, column + used), adds to the gradients of one part.
// sums: [num_vectors][width] of the rows of y_grad that have the vector.
template <int WIDTH>
RECMILL_INLINE void backward_part(const RepeatedColumns& part, size_t in, size_t column, size_t used, const float* sums,
                                  const float* weights, float* copied, float* w_grad, float* vector_grads) {
  const size_t stride = vector_stride(part.width);
  // Weights and their gradients are rows on as many pages: what is read often is copied.
  for (size_t o = 0; o < used; ++o) {
    const float* from = weights + (column + o) * in + part.begin;
    for (size_t i = 0; i < stride; ++i) copied[o * stride + i] = i < part.width ? from[i] : 0.0f;
  }
  auto multiply_columns = [&](auto vectors, auto, size_t at) {
    constexpr int WIDE = decltype(vectors)::value;
    auto of_vectors = [&](auto group, size_t row) {
      multiply<decltype(group)::value, WIDE, true>(
          used, sums + row * WIDTH, WIDTH, copied + at, stride,
          [&](int i, int j, Vector product) __attribute__((always_inline)) {
            float* to = vector_grads + (row + i) * stride + at + j * LANES;
            store(to, column == 0 ? product : load(to) + product);
          });
    };
    for_groups<ROWS>(part.num_vectors, 0, of_vectors);
    auto of_weights = [&](auto group, size_t row) {
      multiply<decltype(group)::value, WIDE, false>(
          part.num_vectors, sums + row, WIDTH, part.vectors + at, stride,
          [&](int i, int j, Vector product) __attribute__((always_inline)) {
            const size_t to = at + j * LANES;
            if (to < part.width)
              store_some<false>(w_grad + (column + row + i) * in + part.begin + to, product, part.width - to);
          });
    };
    for_groups<REPEATED_ROWS>(used, 0, of_weights);
  };
  for_panels<VECTORS>(stride, 0, multiply_columns);
}

void backward_repeated(size_t rows, size_t in, size_t out, const float* y_grad, size_t y_stride,
                       const RepeatedColumns* parts, size_t num_parts, const float* weights, float* scratch,
                       float* w_grad, float* const* vector_grads) {
  auto sum_panel = [&](auto vectors, auto whole, size_t column) {
    constexpr int WIDE = decltype(vectors)::value;
    constexpr bool WHOLE = decltype(whole)::value;
    constexpr size_t WIDTH = WIDE * LANES;
    const size_t used = WHOLE ? WIDTH : out - column;
    auto sum_parts = [&](auto group, size_t first) {
      constexpr int PARTS = decltype(group)::value;
      const Tiles tiles = tiles_of<PARTS>(parts + first, scratch, Constant<WIDTH>{});
      size_t size = 0;
      for (int p = 0; p < PARTS; ++p) size += parts[first + p].num_vectors * WIDTH;
      __builtin_memset(scratch, 0, size * sizeof(float));
      for (size_t row = 0; row < rows; ++row) {
        Vector grads[WIDE];
        for (int j = 0; j < WIDE; ++j)
          grads[j] = load_some<WHOLE>(y_grad + row * y_stride + column + j * LANES, used - j * LANES);
#pragma GCC unroll 4
        for (int p = 0; p < PARTS; ++p) {
          float* to = tiles.values[p] + tiles.index[p][row] * WIDTH;
          for (int j = 0; j < WIDE; ++j) store(to + j * LANES, load(to + j * LANES) + grads[j]);
        }
      }
      for (int p = 0; p < PARTS; ++p)
        backward_part<WIDTH>(parts[first + p], in, column, used, tiles.values[p], weights, scratch + size, w_grad,
                             vector_grads[first + p]);
    };
    for_groups<REPEATED_TOGETHER>(num_parts, 0, sum_parts);
  };
  for_panels<VECTORS>(out, 0, sum_panel);
}

#define RECMILL_TEXT(name) RECMILL_TEXT_OF(name)
#define RECMILL_TEXT_OF(name) #name
#define RECMILL_KERNELS(name) RECMILL_KERNELS_OF(name)
#define RECMILL_KERNELS_OF(name) kernels_##name

}  // namespace

extern const Kernels RECMILL_KERNELS(RECMILL_TARGET);
const Kernels RECMILL_KERNELS(RECMILL_TARGET) = {
    RECMILL_TEXT(RECMILL_TARGET), LANES, VECTORS * LANES, packed_size, pack, forward, input_grad, weight_grad, bias_grad,
    forward_repeated, forward_add, backward_repeated};

}  // namespace dense
