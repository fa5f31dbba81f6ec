#include "mlp.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>

namespace dense {

namespace {

constexpr size_t BLOCK = 256;  // rows; 128 and 512 measured no better

// Room for one block, kept by each thread for its next call. In huge pages where the system has them: columns of a block
// are on as many pages as it has rows.
class Scratch {
 public:
  float* room(size_t size) {
    if (size > size_) {
      const size_t bytes = (size * sizeof(float) + PAGE - 1) / PAGE * PAGE;
      floats_.reset(static_cast<float*>(std::aligned_alloc(PAGE, bytes)));
      if (!floats_) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
      madvise(floats_.get(), bytes, MADV_HUGEPAGE);
#endif
      size_ = bytes / sizeof(float);
    }
    return floats_.get();
  }

 private:
  static constexpr size_t PAGE = 2 << 20;
  struct Free {
    void operator()(float* floats) const { std::free(floats); }
  };
  std::unique_ptr<float, Free> floats_;
  size_t size_ = 0;
};

thread_local Scratch block_scratch, first_grads_scratch, first_weights_scratch, repeats_scratch;

// run(begin, rows) for each block.
template <class Run>
void for_blocks(size_t rows, Run run) {
  for (size_t begin = 0; begin < rows; begin += BLOCK) run(begin, std::min(BLOCK, rows - begin));
}

void copy_rows(size_t rows, size_t columns, const float* from, size_t from_stride, float* to, size_t to_stride) {
  for (size_t row = 0; row < rows; ++row)
    std::memcpy(to + row * to_stride, from + row * from_stride, columns * sizeof(float));
}

// Gradients [rows][columns] where the activation is above 0, else 0.
void mask_rows(size_t rows, size_t columns, const float* grads, const float* activations, float* masked, size_t stride) {
  for (size_t row = 0; row < rows; ++row, grads += columns, activations += columns, masked += stride)
    for (size_t i = 0; i < columns; ++i) masked[i] = activations[i] > 0.0f ? grads[i] : 0.0f;
}

struct Range {
  size_t begin, end;
};

// The columns between repeated ones; one empty range if there are none.
std::vector<Range> other_columns(size_t columns, const Repeats& repeats) {
  std::vector<Range> others;
  size_t end = 0;
  for (const RepeatedFeature& repeated : repeats.ids.features) {
    const size_t begin = repeats.begin + repeated.feature * repeats.width;
    if (begin > end) others.push_back({end, begin});
    end = begin + repeats.width;
  }
  if (end < columns || others.empty()) others.push_back({end, columns});
  return others;
}

// Whole panels of packed weights that have all of the columns.
std::vector<Range> panels_of(const std::vector<Range>& columns, size_t num_columns, size_t panel) {
  std::vector<Range> panels;
  for (const Range& range : columns) {
    const size_t done = panels.empty() ? 0 : panels.back().end;
    const size_t begin = std::max(done, range.begin / panel * panel);
    const size_t end = std::min(num_columns, (range.end + panel - 1) / panel * panel);
    if (range.begin < range.end && begin < end) panels.push_back({begin, end});
  }
  return panels;
}

// The different vectors of repeated columns, room for their gradients, and scratch of the kernels.
struct RepeatedParts {
  std::vector<RepeatedColumns> columns;
  std::vector<float*> grads;
  const RepeatedIds& ids;
  float* scratch;

  RepeatedParts(const Repeats& repeats, const float* x, size_t x_stride) : ids(repeats.ids) {
    const size_t stride = vector_stride(repeats.width);
    size_t num_vectors = 0;
    for (const RepeatedFeature& repeated : repeats.ids.features) {
      columns.push_back(
          {repeats.begin + repeated.feature * repeats.width, repeats.width, repeated.first.size(), nullptr});
      num_vectors += repeated.first.size();
    }
    const size_t size = num_vectors * stride;
    float* vectors = repeats_scratch.room(2 * size + repeated_scratch(columns));
    scratch = vectors + 2 * size;
    for (size_t p = 0; p < columns.size(); ++p) {
      columns[p].vectors = vectors;
      grads.push_back(vectors + size);
      for (const uint32_t row : repeats.ids.features[p].first) {
        const float* from = x + row * x_stride + columns[p].begin;
        std::fill(std::copy_n(from, repeats.width, vectors), vectors + stride, 0.0f);
        vectors += stride;
      }
    }
  }

  RepeatedMatrix matrix() const {
    return {columns.data(), columns.size(), ids.index.data(), ids.begins.data(), ids.rows_of.data()};
  }
};

}  // namespace

// What a backward pass needs of the first layer beside its shape.
struct PackedMlp::FirstLayer {
  std::vector<Range> columns;  // those that do not repeat
  std::vector<Range> panels;   // in which the gradients of these inputs are computed; none without gradients of inputs
  const float* weights;        // packed there
  float* output_grads;         // of all rows, for repeats, or null
};

PackedMlp::PackedMlp(std::vector<LayerShape> shapes, bool trains, const Kernels& kernels)
    : kernels_(kernels), shapes_(std::move(shapes)), trains_(trains), layers_(shapes_.size()) {
  if (shapes_.empty()) throw std::invalid_argument("an MLP needs at least one layer");
  for (size_t i = 0; i < shapes_.size(); ++i) {
    const auto [in, out, relu] = shapes_[i];
    if (in == 0 || out == 0) throw std::invalid_argument("a layer needs inputs and outputs");
    if (i > 0 && in != shapes_[i - 1].out) throw std::invalid_argument("a layer's inputs are not the outputs of the one before");
    layers_[i].forward.resize(kernels_.packed_size(in, out));
    layers_[i].bias.resize(out);
    if (trains && i > 0) layers_[i].backward.resize(kernels_.packed_size(out, in));
  }
}

void PackedMlp::pack(size_t layer, const float* weights, const float* bias) {
  const auto [in, out, relu] = shapes_[layer];
  Packed& packed = layers_[layer];
  kernels_.pack(weights, 1, in, in, out, packed.forward.data());
  if (trains_ && layer > 0) kernels_.pack(weights, in, 1, out, in, packed.backward.data());
  std::copy(bias, bias + out, packed.bias.begin());
}

size_t PackedMlp::hidden_size(size_t rows) const {
  size_t size = 0;
  for (size_t i = 0; i + 1 < shapes_.size(); ++i) size += rows * padded_stride(shapes_[i].out);
  return size;
}

size_t PackedMlp::widest_stride() const {
  size_t widest = padded_stride(in());
  for (const LayerShape& shape : shapes_) widest = std::max(widest, padded_stride(shape.out));
  return widest;
}

void PackedMlp::forward(size_t rows, const float* x, size_t x_stride, float* y, size_t y_stride) const {
  for_blocks(rows, [&](size_t begin, size_t count) {
    float* hidden = block_scratch.room(hidden_size(count));
    forward(count, x + begin * x_stride, x_stride, y + begin * y_stride, y_stride, hidden);
  });
}

void PackedMlp::forward(size_t rows, const float* x, size_t x_stride, float* y, size_t y_stride, float* hidden,
                        const Repeats* repeats) const {
  const bool is_only = shapes_.size() == 1;
  std::vector<Range> others;  // columns of the first layer that do not repeat
  if (repeats) {
    forward_repeats(rows, x, x_stride, *repeats, is_only ? y : hidden, is_only ? y_stride : padded_stride(shapes_[0].out));
    others = other_columns(in(), *repeats);
  }
  for_blocks(rows, [&](size_t begin, size_t count) {
    const float* from = x + begin * x_stride;
    size_t from_stride = x_stride;
    float* activations = hidden;
    for (size_t i = 0; i < shapes_.size(); ++i) {
      const auto [in, out, relu] = shapes_[i];
      const bool last = i + 1 == shapes_.size();
      const size_t to_stride = last ? y_stride : padded_stride(out);
      float* to = (last ? y : activations) + begin * to_stride;
      const float* weights = layers_[i].forward.data();
      if (i > 0 || !repeats)
        kernels_.forward(count, in, out, from, from_stride, weights, layers_[i].bias.data(), relu, to, to_stride);
      else
        for (const Range& part : others)
          kernels_.forward_add(count, part.begin, part.end - part.begin, in, out, from + part.begin, from_stride, weights,
                               relu && &part == &others.back(), to, to_stride);
      from = to;
      from_stride = to_stride;
      activations += rows * to_stride;
    }
  });
}

void PackedMlp::forward_repeats(size_t rows, const float* x, size_t x_stride, const Repeats& repeats, float* y,
                                size_t y_stride) const {
  const RepeatedParts parts(repeats, x, x_stride);
  kernels_.forward_repeated(rows, in(), shapes_[0].out, parts.matrix(), layers_[0].forward.data(),
                            layers_[0].bias.data(), parts.scratch, y, y_stride);
}

void PackedMlp::backward(const Pass& pass, const float* output_grads, const Gradients& grads) const {
  if (!trains_) throw std::invalid_argument("this MLP was packed for forward passes only");
  if (pass.rows == 0) {
    for (size_t i = 0; i < shapes_.size(); ++i) {
      std::fill_n(grads.weights[i], shapes_[i].in * shapes_[i].out, 0.0f);
      std::fill_n(grads.biases[i], shapes_[i].out, 0.0f);
    }
  }
  const FirstLayer first = first_layer(pass, grads.inputs);
  for_blocks(pass.rows,
             [&](size_t begin, size_t rows) { backward_block(pass, begin, rows, output_grads, grads, first); });
  if (pass.repeats) backward_repeats(pass, first.output_grads, grads);
}

// Its weights are packed by each thread for itself: few of their columns are left when ids repeat, and none below numbers.
PackedMlp::FirstLayer PackedMlp::first_layer(const Pass& pass, bool has_input_grads) const {
  const auto [in, out, relu] = shapes_[0];
  FirstLayer first{{{0, in}}, {}, nullptr, nullptr};
  if (pass.repeats) {
    first.columns = other_columns(in, *pass.repeats);
    first.output_grads = first_grads_scratch.room(pass.rows * padded_stride(out));
  }
  if (!has_input_grads) return first;
  first.panels = panels_of(first.columns, in, kernels_.panel);
  float* weights = first_weights_scratch.room(kernels_.packed_size(out, in));
  for (const auto [begin, end] : first.panels)
    kernels_.pack(pass.first_weights + begin, in, 1, out, end - begin, weights + begin * out);
  first.weights = weights;
  return first;
}

void PackedMlp::backward_block(const Pass& pass, size_t begin, size_t rows, const float* output_grads,
                               const Gradients& grads, const FirstLayer& first) const {
  const size_t block_size = BLOCK * widest_stride();
  float* block = block_scratch.room(2 * block_size);
  const auto grads_of = [&](size_t layer) {  // of the layer's outputs
    if (layer == 0 && first.output_grads) return first.output_grads + begin * padded_stride(shapes_[0].out);
    return block + layer % 2 * block_size;
  };
  const float* activations = pass.hidden + hidden_size(pass.rows);
  const size_t last = shapes_.size() - 1;
  output_grads += begin * out();
  if (shapes_[last].relu)
    mask_rows(rows, out(), output_grads, pass.outputs + begin * out(), grads_of(last), padded_stride(out()));
  else copy_rows(rows, out(), output_grads, out(), grads_of(last), padded_stride(out()));
  for (size_t i = last; i > 0; --i) {
    const auto [in, out, relu] = shapes_[i];
    const size_t out_stride = padded_stride(out), x_stride = padded_stride(in);
    activations -= pass.rows * x_stride;
    const float *x = activations + begin * x_stride, *given = grads_of(i);
    kernels_.input_grad(rows, out, in, given, out_stride, layers_[i].backward.data(), shapes_[i - 1].relu ? x : nullptr,
                        x_stride, grads_of(i - 1), x_stride);
    kernels_.weight_grad(rows, in, out, given, out_stride, x, x_stride, begin > 0, grads.weights[i], in);
    kernels_.bias_grad(rows, out, given, out_stride, begin > 0, grads.biases[i]);
  }
  backward_first(pass, begin, rows, grads_of(0), grads, first);
}

// The first layer's gradients, without those of columns that repeat.
void PackedMlp::backward_first(const Pass& pass, size_t begin, size_t rows, const float* given, const Gradients& grads,
                               const FirstLayer& first) const {
  const size_t in = shapes_[0].in, out = shapes_[0].out, out_stride = padded_stride(out);
  for (const Range& part : first.columns)
    kernels_.weight_grad(rows, part.end - part.begin, out, given, out_stride, pass.inputs + begin * in + part.begin, in,
                         begin > 0, grads.weights[0] + part.begin, in);
  // What panels write beyond the columns is overwritten later.
  for (const Range& panel : first.panels)
    kernels_.input_grad(rows, out, panel.end - panel.begin, given, out_stride, first.weights + panel.begin * out, nullptr, 0,
                        grads.inputs + begin * in + panel.begin, in);
  kernels_.bias_grad(rows, out, given, out_stride, begin > 0, grads.biases[0]);
}

void PackedMlp::backward_repeats(const Pass& pass, const float* given, const Gradients& grads) const {
  const size_t in = shapes_[0].in, out = shapes_[0].out;
  const Repeats& repeats = *pass.repeats;
  const RepeatedParts parts(repeats, pass.inputs, in);
  kernels_.backward_repeated(in, out, given, padded_stride(out), parts.matrix(), pass.first_weights,
                             parts.scratch, grads.weights[0], parts.grads.data());
  if (!grads.inputs) return;
  for (const RepeatedColumns& part : parts.columns)
    for (size_t row = 0; row < pass.rows; ++row) std::fill_n(grads.inputs + row * in + part.begin, part.width, 0.0f);
  for (size_t p = 0; p < parts.columns.size(); ++p)
    for (size_t v = 0; v < parts.columns[p].num_vectors; ++v)
      std::copy_n(parts.grads[p] + v * vector_stride(repeats.width), repeats.width,
                  grads.inputs + repeats.ids.features[p].first[v] * in + parts.columns[p].begin);
}

}  // namespace dense
