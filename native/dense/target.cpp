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

constexpr int power_below(int value) { return value <= 2 ? 1 : 2 * power_below((value + 1) / 2); }

// run(Constant<rows>, row) for each group of rows that one kernel takes: the largest first, then powers of two for the
// rest, which is mostly one: fewer than 4 rows of 2 accumulators wait for each other.
template <int MOST, class Run>
RECMILL_INLINE void for_groups(size_t rows, size_t row, Run& run) {
  for (; row + MOST <= rows; row += MOST) run(Constant<MOST>{}, row);
  if constexpr (MOST > 1) for_groups<power_below(MOST)>(rows, row, run);
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

// Element j of row i becomes element i of row j.
RECMILL_INLINE void transpose(Vector (&rows)[LANES]) {
  typedef int Order __attribute__((vector_size(LANES * sizeof(int))));
#pragma GCC unroll 4
  for (size_t half = LANES / 2; half > 0; half /= 2) {
    Order upper, lower;  // squares of this size change places across the diagonal
    for (size_t j = 0; j < LANES; ++j) {
      upper[j] = static_cast<int>(j & half ? LANES + j - half : j);
      lower[j] = static_cast<int>(j & half ? LANES + j : j + half);
    }
#pragma GCC unroll 16
    for (size_t i = 0; i < LANES; ++i) {
      if (i & half) continue;
      const Vector above = rows[i], below = rows[i + half];
      rows[i] = __builtin_shuffle(above, below, upper);
      rows[i + half] = __builtin_shuffle(above, below, lower);
    }
  }
}

// packed[row][c] = from[row + c * stride] for c < used, else 0.
template <size_t WIDTH>
RECMILL_INLINE void pack_transposed(const float* from, size_t stride, size_t k, size_t used, float* packed) {
  size_t row = 0;
  for (; row + LANES <= k; row += LANES)
    for (size_t c = 0; c < WIDTH; c += LANES) {
      Vector square[LANES];
#pragma GCC unroll 16
      for (size_t i = 0; i < LANES; ++i) square[i] = c + i < used ? load(from + (c + i) * stride + row) : Vector{};
      transpose(square);
#pragma GCC unroll 16
      for (size_t i = 0; i < LANES; ++i) store(packed + (row + i) * WIDTH + c, square[i]);
    }
  for (; row < k; ++row)
    for (size_t c = 0; c < WIDTH; ++c) packed[row * WIDTH + c] = c < used ? from[row + c * stride] : 0.0f;
}

void pack(const float* weights, size_t k_stride, size_t n_stride, size_t k, size_t n, float* packed) {
  auto pack_panel = [&](auto vectors, auto whole, size_t column) {
    constexpr size_t WIDTH = decltype(vectors)::value * LANES;
    const size_t used = decltype(whole)::value ? WIDTH : n - column;
    const float* from = weights + column * n_stride;
    if (k_stride == 1) {
      pack_transposed<WIDTH>(from, n_stride, k, used, packed);
    } else {
      for (size_t row = 0; row < k; ++row)
        for (size_t c = 0; c < WIDTH; ++c) packed[row * WIDTH + c] = c < used ? from[row * k_stride + c] : 0.0f;
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

// Repeated columns whose products are in the cache at once: [vectors][columns of a panel], from `base` on.
struct Group {
  size_t first, count;  // parts
  size_t base, size;    // vectors
};

// run(group) for all parts, in groups that fit the cache; a larger part is one of its own.
template <class Run>
RECMILL_INLINE void for_part_groups(const RepeatedMatrix& x, Run run) {
  Group group{0, 0, 0, 0};
  for (size_t p = 0; p < x.num_parts; ++p) {
    const size_t more = x.parts[p].num_vectors;
    if (group.count > 0 && group.size + more > REPEATED_TOGETHER) {
      run(group);
      group = {p, 0, group.base + group.size, 0};
    }
    ++group.count, group.size += more;
  }
  run(group);
}

void forward_repeated(size_t rows, size_t k, size_t n, const RepeatedMatrix& x, const float* packed, const float* bias,
                      float* scratch, float* y, size_t y_stride) {
  auto add_panel = [&](auto vectors, auto whole, size_t column) {
    constexpr int WIDE = decltype(vectors)::value;
    constexpr bool WHOLE = decltype(whole)::value;
    constexpr size_t WIDTH = WIDE * LANES;
    auto add_parts = [&](Group group) __attribute__((always_inline)) {
      float* tile = scratch;
      for (size_t p = group.first; p < group.first + group.count; ++p) {
        const RepeatedColumns& part = x.parts[p];
        const size_t stride = vector_stride(part.width);
        auto multiply_group = [&](auto size, size_t row) {
          multiply<decltype(size)::value, WIDE, true>(
              part.width, part.vectors + row * stride, stride, packed + column * k + part.begin * WIDTH, WIDTH,
              [&](int i, int j, Vector sums) __attribute__((always_inline)) {
                store(tile + (row + i) * WIDTH + j * LANES, sums);
              });
        };
        for_groups<ROWS>(part.num_vectors, 0, multiply_group);
        tile += part.num_vectors * WIDTH;
      }
      for (size_t row = 0; row < rows; ++row) {
        const uint32_t* index = x.index + row * x.num_parts + group.first;
        float* to = y + row * y_stride + column;
        const float* from = group.first == 0 ? bias + column : to;
        Vector sums[WIDE];
        for (int j = 0; j < WIDE; ++j) sums[j] = load_some<WHOLE>(from + j * LANES, n - column - j * LANES);
        for (size_t p = 0; p < group.count; ++p)
          for (int j = 0; j < WIDE; ++j) sums[j] += load(scratch + (index[p] - group.base) * WIDTH + j * LANES);
        for (int j = 0; j < WIDE; ++j) store_some<WHOLE>(to + j * LANES, sums[j], n - column - j * LANES);
      }
    };
    for_part_groups(x, add_parts);
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

void backward_repeated(size_t in, size_t out, const float* y_grad, size_t y_stride, const RepeatedMatrix& x,
                       const float* weights, float* scratch, float* w_grad, float* const* vector_grads) {
  auto sum_panel = [&](auto vectors, auto whole, size_t column) {
    constexpr int WIDE = decltype(vectors)::value;
    constexpr bool WHOLE = decltype(whole)::value;
    constexpr size_t WIDTH = WIDE * LANES;
    const size_t used = WHOLE ? WIDTH : out - column;
    const uint32_t *begin = x.begins, *rows_of = x.rows_of;
    for (size_t p = 0; p < x.num_parts; ++p) {
      const size_t num_vectors = x.parts[p].num_vectors;
      float* to = scratch;
      for (size_t v = 0; v < num_vectors; ++v, ++begin, to += WIDTH) {
        Vector sums[WIDE] = {};
        for (const uint32_t *row = rows_of + begin[0], *end = rows_of + begin[1]; row < end; ++row)
          for (int j = 0; j < WIDE; ++j)
            sums[j] += load_some<WHOLE>(y_grad + *row * y_stride + column + j * LANES, used - j * LANES);
        for (int j = 0; j < WIDE; ++j) store(to + j * LANES, sums[j]);
      }
      backward_part<WIDTH>(x.parts[p], in, column, used, scratch, weights, to, w_grad, vector_grads[p]);
    }
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
