// Scores of one user's candidates by a ranker whose layers are known: DLRM with `cat` or `dot`, Wide & Deep.
// Plain C++ over the rows of a bundle; rank.cpp has what Python calls, rank_stress.cpp runs it under sanitizers.
//
// The first layer of the top (or of the deep part) is two: what it reads of the user and the context is multiplied once
// and becomes the bias of what it reads of each candidate. Features of few different rows are multiplied once for each row.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

#include "dense/kernels.hpp"
#include "dense/serving.hpp"

namespace rank {

// A linear layer as torch stores it: weights[out][in].
struct Linear {
  size_t in = 0, out = 0;
  std::vector<float> weights, bias;
};

// Columns are in this order. Of the user: below or numbers, then `cat`: vectors, `dot`: products among them. Of an item: below or
// numbers, then `cat`: vectors, `dot`: products of each with the user's, then among them. What is below is the bottom's output;
// it is the user's when items have no numbers. In products it is the first vector.
struct Layers {
  bool is_dot = false;
  size_t user_numbers = 0, item_numbers = 0;
  size_t user_vectors = 0;      // floats; of `dot` as many vectors of `dim`
  size_t dim = 0;               // of `dot`
  std::vector<size_t> dims;     // of items' features
  std::vector<std::vector<float>> projections;  // of `dot`: [dims[f]][dim], or empty
  std::vector<Linear> bottom;   // reads the user's numbers first
  Linear once, each;            // the first layer; `once` has the bias
  std::vector<Linear> rest;
};

// The largest values by calibration: of inputs of the first layer, and of outputs of each hidden layer.
struct Ranges {
  std::vector<float> inputs;
  std::vector<std::vector<float>> hidden;
};

// One feature of all candidates: rows[slots[i]].
struct Feature {
  dense::Rows rows;
  const int64_t* slots;
};

struct Request {
  size_t count = 0;  // candidates
  const float* user_numbers = nullptr;
  const float* user_vectors = nullptr;
  const float* item_numbers = nullptr;  // [count][item_numbers]
  std::vector<Feature> features, wide;
  float user_wide = 0;
};

constexpr size_t BLOCK = 256;  // rows that go through all layers together

// Different rows among candidates, if they are few.
class FewRows {
 public:
  // Whether there are at most `most`; `indices[i]` is then where slots[i] is in `rows`.
  bool find(const int64_t* slots, size_t count, size_t most, int32_t* indices) {
    rows.clear();
    size_t capacity = 64;
    while (capacity < 4 * most) capacity *= 2;
    if (entries_.size() < capacity) entries_.assign(capacity, Entry{}), round_ = 0;
    if (++round_ == 0) std::fill(entries_.begin(), entries_.end(), Entry{}), round_ = 1;
    const size_t mask = entries_.size() - 1;
    for (size_t i = 0; i < count; ++i) {
      size_t at = (static_cast<uint64_t>(slots[i]) * 0x9E3779B97F4A7C15ull >> 32) & mask;
      while (entries_[at].round == round_ && entries_[at].slot != slots[i]) at = (at + 1) & mask;
      if (entries_[at].round != round_) {
        if (rows.size() == most) return false;
        entries_[at] = {slots[i], round_, static_cast<int32_t>(rows.size())};
        rows.push_back(slots[i]);
      }
      indices[i] = entries_[at].index;
    }
    return true;
  }

  std::vector<int64_t> rows;

 private:
  struct Entry {
    int64_t slot = 0;
    uint32_t round = 0;
    int32_t index = 0;
  };
  std::vector<Entry> entries_;
  uint32_t round_ = 0;
};

class Ranker {
 public:
  Ranker(Layers layers, const dense::Kernels& kernels, const dense::ServingKernels& serving)
      : id_(next_id()), layers_(std::move(layers)), kernels_(kernels), serving_(serving) {
    check();
    const Layers& l = layers_;
    for (size_t i = 0; i < l.bottom.size(); ++i) bottom_.push_back(pack_columns(l.bottom[i], 0, i == 0 ? l.user_numbers : l.bottom[i].in));
    if (below_is_each()) bottom_items_ = pack_columns(l.bottom[0], l.user_numbers, l.bottom[0].in);
    once_ = pack_columns(l.once, 0, l.once.in);
    each_ = pack_columns(l.each, 0, l.each.in);
    by_input_.resize(l.each.in * l.each.out);
    for (size_t n = 0; n < l.each.out; ++n)
      for (size_t k = 0; k < l.each.in; ++k) by_input_[k * l.each.out + n] = l.each.weights[n * l.each.in + k];
    if (!l.is_dot)
      for (size_t f = 0, column = item_head(); f < l.dims.size(); column += l.dims[f++])
        of_features_.push_back(pack_columns(l.each, column, column + l.dims[f]));
    for (const Linear& layer : l.rest) rest_.push_back(pack_columns(layer, 0, layer.in));
    for (size_t f = 0; f < l.projections.size(); ++f) {
      projections_.emplace_back();
      if (l.projections[f].empty()) continue;
      projections_[f].resize(kernels_.packed_size(l.dims[f], l.dim));
      kernels_.pack(l.projections[f].data(), l.dim, 1, l.dims[f], l.dim, projections_[f].data());
    }
  }

  const Layers& layers() const { return layers_; }
  bool in_bytes() const { return !byte_layers_.empty(); }

  // Hidden layers multiply bytes from now on: inputs by these ranges, weights by the largest of each column.
  void use_bytes(const Ranges& ranges) {
    const Layers& l = layers_;
    if (l.rest.empty()) throw std::invalid_argument("products of bytes need a hidden layer");
    if (ranges.inputs.size() != l.each.in || ranges.hidden.size() != l.rest.size())
      throw std::invalid_argument("ranges need a value for each input, and a list for each hidden layer");
    for (size_t i = 0; i < l.rest.size(); ++i)
      if (ranges.hidden[i].size() != l.rest[i].in) throw std::invalid_argument("ranges of a hidden layer need a value for each output");
    std::vector<Quantised> found;
    found.push_back(quantise(l.each, ranges.inputs, true));
    for (size_t i = 0; i + 1 < l.rest.size(); ++i) found.push_back(quantise(l.rest[i], ranges.hidden[i], false));
    for (size_t i = 0; i + 1 < found.size(); ++i) found[i].set_outputs(ranges.hidden[i]);
    input_inverse_.assign((l.each.in + 15) / 16 * 16, 0.0f);
    for (size_t k = 0; k < l.each.in; ++k) input_inverse_[k] = 1 / step_of(ranges.inputs[k], SIGNED_STEPS);
    byte_layers_ = std::move(found);
  }

  // logits[count]. Any number of threads at once.
  void rank(const Request& request, float* logits) const {
    Scratch& s = scratch();
    make_once(request, s);
    if (!in_bytes() && !layers_.is_dot) find_few(request, s);
    else s.few.assign(layers_.dims.size(), 0);
    const Packed& first = choose_first(s);
    for (size_t begin = 0; begin < request.count; begin += BLOCK) {
      const size_t rows = std::min(BLOCK, request.count - begin);
      make_inputs(request, begin, rows, s);
      if (in_bytes()) run_bytes(rows, s, logits + begin);
      else run_floats(first, begin, rows, s, logits + begin);
    }
    add_wide(request, s, logits);
  }

  // Inputs of the first layer for each candidate, [count][each.in]: what calibration looks at.
  void inputs(const Request& request, float* to) const {
    Scratch& s = scratch();
    make_once(request, s);
    s.few.assign(layers_.dims.size(), 0);
    for (size_t begin = 0; begin < request.count; begin += BLOCK) {
      const size_t rows = std::min(BLOCK, request.count - begin), width = layers_.each.in;
      make_inputs(request, begin, rows, s);
      for (size_t row = 0; row < rows; ++row) std::copy_n(s.x.data() + row * s.x_stride, width, to + (begin + row) * width);
    }
  }

  // Outputs of each hidden layer for each candidate, in float32.
  void hidden(const Request& request, const std::vector<float*>& to) const {
    Scratch& s = scratch();
    make_once(request, s);
    s.few.assign(layers_.dims.size(), 0);
    std::vector<float> logits(request.count);
    for (size_t begin = 0; begin < request.count; begin += BLOCK) {
      const size_t rows = std::min(BLOCK, request.count - begin);
      make_inputs(request, begin, rows, s);
      run_floats(each_, begin, rows, s, logits.data(), &to);
    }
  }

 private:
  static constexpr float SIGNED_STEPS = 127, UNSIGNED_STEPS = 255;
  // Features are multiplied once for each different row if those are at most this share, and stay in the cache.
  static constexpr size_t FEW_SHARE = 4, MOST_FEW = 256;

  struct Packed {
    size_t in, out;
    std::vector<float> weights, bias;
  };

  struct Quantised {
    size_t k, n;  // filled up
    std::vector<int8_t> packed;
    std::vector<float> scales, bias, inverse;

    void set_outputs(const std::vector<float>& most) {
      inverse.assign(n, 0.0f);
      for (size_t c = 0; c < most.size(); ++c) inverse[c] = 1 / step_of(most[c], UNSIGNED_STEPS);
    }
    dense::ByteLayer layer() const { return {k, n, packed.data(), scales.data(), inverse.empty() ? nullptr : inverse.data()}; }
  };

  struct Scratch {
    std::vector<float> base, below, next, once, x, vectors, rows, y, y2, bias, tables, item_bias;
    std::vector<uint8_t> bytes, bytes2;
    size_t x_stride = 0, indices_stride = 0;
    std::vector<char> few;           // of each feature
    std::vector<int32_t> indices;    // [feature][count] into its table
    std::vector<size_t> table_starts;
    std::vector<const float*> tables_of;
    FewRows few_rows;
    // The first layer without those features, as it was packed for the last request.
    uint64_t packed_for = 0;
    std::vector<char> packed_few;
    std::vector<float> chosen;
    Packed packed{0, 0, {}, {}};
  };

  static Scratch& scratch() {
    thread_local Scratch of_thread;
    return of_thread;
  }
  static uint64_t next_id() {
    static std::atomic<uint64_t> last{0};
    return ++last;
  }
  static float step_of(float most, float steps) { return std::max(most, 1e-6f) / steps; }
  static float* room(std::vector<float>& buffer, size_t size) {
    if (buffer.size() < size) buffer.resize(size);
    return buffer.data();
  }

  bool has_bottom() const { return !layers_.bottom.empty(); }
  bool below_is_once() const { return has_bottom() && !layers_.item_numbers; }
  bool below_is_each() const { return has_bottom() && layers_.item_numbers; }
  size_t below_width() const { return layers_.bottom.back().out; }
  size_t once_head() const { return has_bottom() ? (below_is_once() ? below_width() : 0) : layers_.user_numbers; }
  size_t item_head() const { return has_bottom() ? (below_is_each() ? below_width() : 0) : layers_.item_numbers; }
  size_t num_user_vectors() const { return layers_.user_vectors / layers_.dim + below_is_once(); }
  size_t num_item_vectors() const { return layers_.dims.size() + below_is_each(); }
  static size_t num_pairs(size_t count) { return count ? count * (count - 1) / 2 : 0; }

  size_t once_width() const {
    return once_head() + (layers_.is_dot ? num_pairs(num_user_vectors()) : layers_.user_vectors);
  }
  size_t each_width() const {
    size_t width = item_head();
    if (layers_.is_dot) return width + num_item_vectors() * num_user_vectors() + num_pairs(num_item_vectors());
    for (const size_t dim : layers_.dims) width += dim;
    return width;
  }

  static void require(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
  }
  static void check_chain(const std::vector<Linear>& layers, size_t in) {
    for (const Linear& layer : layers) {
      require(layer.in == in && layer.out && layer.weights.size() == layer.in * layer.out && layer.bias.size() == layer.out,
              "a layer does not fit the one before it");
      in = layer.out;
    }
  }
  void check() const {
    const Layers& l = layers_;
    if (l.is_dot) {
      require(l.dim && l.user_vectors % l.dim == 0 && l.projections.size() == l.dims.size(), "products need vectors of one dim");
      require(has_bottom() ? below_width() == l.dim : l.user_numbers + l.item_numbers == 0, "numbers are no vector of that dim");
      for (size_t f = 0; f < l.dims.size(); ++f)
        require(l.projections[f].empty() ? l.dims[f] == l.dim : l.projections[f].size() == l.dims[f] * l.dim,
                "a feature of another dim needs a projection");
    }
    check_chain(l.bottom, l.user_numbers + l.item_numbers);
    require(l.once.in == once_width() && l.each.in == each_width() && l.once.out == l.each.out && l.each.out && l.each.in,
            "the first layer does not fit its inputs");
    require(l.once.weights.size() == l.once.in * l.once.out && l.once.bias.size() == l.once.out &&
                l.each.weights.size() == l.each.in * l.each.out,
            "the first layer lacks weights");
    check_chain(l.rest, l.each.out);
    require((l.rest.empty() ? l.each : l.rest.back()).out == 1, "the last layer must have one output");
  }

  Packed pack_columns(const Linear& layer, size_t begin, size_t end) const {
    Packed packed{end - begin, layer.out, std::vector<float>(kernels_.packed_size(end - begin, layer.out)), layer.bias};
    kernels_.pack(layer.weights.data() + begin, 1, layer.in, end - begin, layer.out, packed.weights.data());
    return packed;
  }

  Quantised quantise(const Linear& layer, const std::vector<float>& most, bool is_signed) const {
    const size_t panel = serving_.panel, k = (layer.in + 3) / 4 * 4, n = (layer.out + panel - 1) / panel * panel;
    Quantised found{k, n, std::vector<int8_t>(k * n), std::vector<float>(n), std::vector<float>(n), {}};
    std::vector<float> column(layer.in);
    for (size_t c = 0; c < layer.out; ++c) {
      float largest = 1e-20f;
      for (size_t i = 0; i < layer.in; ++i) {
        column[i] = layer.weights[c * layer.in + i] * step_of(most[i], is_signed ? SIGNED_STEPS : UNSIGNED_STEPS);
        largest = std::max(largest, std::fabs(column[i]));
      }
      found.scales[c] = largest / SIGNED_STEPS;
      int sum = 0;
      for (size_t i = 0; i < layer.in; ++i) {
        const int step = static_cast<int>(std::lrint(column[i] / found.scales[c]));
        sum += step;
        found.packed[c / panel * panel * k + i / 4 * panel * 4 + c % panel * 4 + i % 4] = static_cast<int8_t>(step);
      }
      // Signed inputs are 128 larger as bytes.
      found.bias[c] = (layer.bias.empty() ? 0.0f : layer.bias[c]) - (is_signed ? 128.0f * static_cast<float>(sum) * found.scales[c] : 0.0f);
    }
    return found;
  }

  void forward(const Packed& layer, size_t rows, const float* x, size_t x_stride, const float* bias, bool relu, float* y,
               size_t y_stride) const {
    if (layer.in) {
      kernels_.forward(rows, layer.in, layer.out, x, x_stride, layer.weights.data(), bias, relu, y, y_stride);
      return;
    }
    for (size_t row = 0; row < rows; ++row)
      for (size_t c = 0; c < layer.out; ++c) y[row * y_stride + c] = relu && bias[c] < 0 ? 0 : bias[c];
  }

  // The rest of the bottom after its first layer, for rows in s.below; the result is there too. Rows are padded.
  void run_bottom(size_t rows, Scratch& s) const {
    for (size_t i = 1; i < bottom_.size(); ++i) {
      const size_t stride = dense::padded_stride(bottom_[i].out);
      forward(bottom_[i], rows, s.below.data(), dense::padded_stride(bottom_[i].in), bottom_[i].bias.data(), true,
              room(s.next, rows * stride), stride);
      std::swap(s.below, s.next);
    }
  }

  // What all candidates share: the bias of the first layer in s.base, and with item numbers that of the bottom in s.item_bias.
  void make_once(const Request& r, Scratch& s) const {
    const Layers& l = layers_;
    float* once = room(s.once, once_width() + 1);
    if (has_bottom()) {
      const size_t stride = dense::padded_stride(bottom_[0].out);
      forward(bottom_[0], 1, r.user_numbers, l.user_numbers, bottom_[0].bias.data(), below_is_once(), room(s.below, stride), stride);
      if (below_is_once()) run_bottom(1, s), std::copy_n(s.below.data(), below_width(), once);
      else s.item_bias.assign(s.below.begin(), s.below.begin() + static_cast<std::ptrdiff_t>(bottom_[0].out));
    } else {
      std::copy_n(r.user_numbers, l.user_numbers, once);
    }
    if (l.is_dot) {
      float* vectors = room(s.vectors, num_user_vectors() * l.dim + 1);
      if (below_is_once()) std::copy_n(once, l.dim, vectors), vectors += l.dim;
      std::copy_n(r.user_vectors, l.user_vectors, vectors);
      serving_.pair_dots(num_user_vectors(), l.dim, s.vectors.data(), once + once_head());
      pack_user_vectors(s);
    } else {
      std::copy_n(r.user_vectors, l.user_vectors, once + once_head());
    }
    forward(once_, 1, once, once_width(), l.once.bias.data(), false, room(s.base, l.once.out), l.once.out);
  }

  void pack_user_vectors(Scratch& s) const {
    const size_t count = num_user_vectors();
    if (!count) return;
    room(s.tables, kernels_.packed_size(layers_.dim, count));
    kernels_.pack(s.vectors.data(), 1, layers_.dim, layers_.dim, count, s.tables.data());
  }

  // Which features have few different rows, and their products with the first layer.
  void find_few(const Request& r, Scratch& s) const {
    const size_t num = layers_.dims.size(), most = std::min(MOST_FEW, r.count / FEW_SHARE), stride = dense::padded_stride(layers_.each.out);
    s.few.assign(num, 0), s.table_starts.assign(num, 0);
    if (s.indices.size() < num * r.count) s.indices.resize(num * r.count);
    s.bias.assign(layers_.each.out, 0.0f);
    size_t size = 0, used = 0;
    for (size_t f = 0; f < num && most; ++f) {
      if (!s.few_rows.find(r.features[f].slots, r.count, most, s.indices.data() + used * r.count)) continue;
      const size_t rows = s.few_rows.rows.size(), dim = layers_.dims[f];
      s.few[f] = 1, s.table_starts[used++] = size;
      serving_.gather(r.features[f].rows, s.few_rows.rows.data(), rows, room(s.rows, rows * dim), dim);
      float* table = room(s.tables, size + rows * stride) + size;
      forward(of_features_[f], rows, s.rows.data(), dim, s.bias.data(), false, table, stride);
      size += rows * stride;
    }
    s.tables_of.clear();
    for (size_t t = 0; t < used; ++t) s.tables_of.push_back(s.tables.data() + s.table_starts[t]);
    s.indices_stride = r.count;
  }

  // The first layer for the other features: packed anew when they are not those of this thread's last request.
  const Packed& choose_first(Scratch& s) const {
    if (std::find(s.few.begin(), s.few.end(), 1) == s.few.end()) return each_;
    if (s.packed_for == id_ && s.packed_few == s.few) return s.packed;
    const size_t out = layers_.each.out;
    s.chosen.assign(by_input_.begin(), by_input_.begin() + static_cast<std::ptrdiff_t>(item_head() * out));
    for (size_t f = 0, column = item_head(); f < layers_.dims.size(); column += layers_.dims[f++])
      if (!s.few[f])
        s.chosen.insert(s.chosen.end(), by_input_.begin() + static_cast<std::ptrdiff_t>(column * out),
                        by_input_.begin() + static_cast<std::ptrdiff_t>((column + layers_.dims[f]) * out));
    s.packed.in = s.chosen.size() / out, s.packed.out = out;
    s.packed.weights.resize(kernels_.packed_size(s.packed.in, out));
    kernels_.pack(s.chosen.data(), out, 1, s.packed.in, out, s.packed.weights.data());
    s.packed_for = id_, s.packed_few = s.few;
    return s.packed;
  }

  // s.x: what the first layer reads of these candidates, without features that have few rows.
  void make_inputs(const Request& r, size_t begin, size_t rows, Scratch& s) const {
    const Layers& l = layers_;
    const size_t stride = s.x_stride = dense::padded_stride(l.each.in);
    float* x = room(s.x, rows * stride);
    if (below_is_each()) {
      const size_t below_stride = dense::padded_stride(bottom_items_.out);
      forward(bottom_items_, rows, r.item_numbers + begin * l.item_numbers, l.item_numbers, s.item_bias.data(), true,
              room(s.below, rows * below_stride), below_stride);
      run_bottom(rows, s);
      copy_rows(rows, below_width(), s.below.data(), dense::padded_stride(below_width()), x, stride);
    } else if (!has_bottom()) {
      copy_rows(rows, l.item_numbers, r.item_numbers + begin * l.item_numbers, l.item_numbers, x, stride);
    }
    if (l.is_dot) return make_products(r, begin, rows, s);
    size_t column = item_head();
    for (size_t f = 0; f < l.dims.size(); ++f) {
      if (s.few[f]) continue;
      serving_.gather(r.features[f].rows, r.features[f].slots + begin, rows, x + column, stride);
      column += l.dims[f];
    }
  }

  static void copy_rows(size_t rows, size_t columns, const float* from, size_t from_stride, float* to, size_t to_stride) {
    for (size_t row = 0; row < rows; ++row) std::copy_n(from + row * from_stride, columns, to + row * to_stride);
  }

  void make_products(const Request& r, size_t begin, size_t rows, Scratch& s) const {
    const Layers& l = layers_;
    const size_t items = num_item_vectors(), users = num_user_vectors(), of_row = items * l.dim;
    float* vectors = room(s.rows, rows * of_row);
    if (below_is_each()) copy_rows(rows, l.dim, s.x.data(), s.x_stride, vectors, of_row);
    for (size_t f = 0; f < l.dims.size(); ++f) {
      float* to = vectors + (f + below_is_each()) * l.dim;
      if (projections_[f].empty()) {
        serving_.gather(r.features[f].rows, r.features[f].slots + begin, rows, to, of_row);
        continue;
      }
      serving_.gather(r.features[f].rows, r.features[f].slots + begin, rows, room(s.y, rows * l.dims[f]), l.dims[f]);
      s.bias.assign(l.dim, 0.0f);
      kernels_.forward(rows, l.dims[f], l.dim, s.y.data(), l.dims[f], projections_[f].data(), s.bias.data(), false, to, of_row);
    }
    float* x = s.x.data() + item_head();
    if (users) {
      s.bias.assign(users, 0.0f);
      kernels_.forward(rows * items, l.dim, users, vectors, l.dim, s.tables.data(), s.bias.data(), false,
                       room(s.y, rows * items * users), users);
      copy_rows(rows, items * users, s.y.data(), items * users, x, s.x_stride);
    }
    for (size_t row = 0; row < rows; ++row) serving_.pair_dots(items, l.dim, vectors + row * of_row, x + row * s.x_stride + items * users);
  }

  void run_floats(const Packed& first, size_t begin, size_t rows, Scratch& s, float* logits, const std::vector<float*>* hidden = nullptr) const {
    const size_t num_tables = s.few.empty() || &first == &each_ ? 0 : s.tables_of.size(), out = layers_.each.out;
    const bool is_last = rest_.empty();
    size_t stride = is_last ? 1 : dense::padded_stride(out);
    float* y = is_last ? logits : room(s.y, rows * stride);
    forward(first, rows, s.x.data(), s.x_stride, s.base.data(), !is_last && !num_tables, y, stride);
    if (num_tables) add_tables(begin, rows, y, stride, is_last, s);
    for (size_t i = 0; i < rest_.size(); ++i) {
      if (hidden) copy_rows(rows, rest_[i].in, y, stride, (*hidden)[i] + begin * rest_[i].in, rest_[i].in);
      const bool last = i + 1 == rest_.size();
      const size_t next_stride = last ? 1 : dense::padded_stride(rest_[i].out);
      float* next = last ? logits : room(s.y2, rows * next_stride);
      forward(rest_[i], rows, y, stride, rest_[i].bias.data(), !last, next, next_stride);
      if (!last) std::swap(s.y, s.y2);
      y = next, stride = next_stride;
    }
  }

  void add_tables(size_t begin, size_t rows, float* y, size_t stride, bool is_last, const Scratch& s) const {
    if (!is_last) {
      serving_.add_rows(rows, layers_.each.out, y, stride, s.tables_of.data(), s.tables_of.size(), s.indices.data() + begin, s.indices_stride);
      return;
    }
    const size_t table_stride = dense::padded_stride(layers_.each.out);
    for (size_t t = 0; t < s.tables_of.size(); ++t)
      for (size_t row = 0; row < rows; ++row)
        y[row] += s.tables_of[t][static_cast<size_t>(s.indices[t * s.indices_stride + begin + row]) * table_stride];
  }

  void run_bytes(size_t rows, Scratch& s, float* logits) const {
    const Quantised& first = byte_layers_[0];
    const size_t whole = input_inverse_.size(), out = layers_.each.out;
    const auto bytes_room = [](std::vector<uint8_t>& buffer, size_t size) {
      if (buffer.size() < size) buffer.resize(size);
      return buffer.data();
    };
    uint8_t* x = bytes_room(s.bytes, rows * whole);
    for (size_t row = 0; row < rows; ++row) serving_.to_bytes(whole, s.x.data() + row * s.x_stride, input_inverse_.data(), x + row * whole);
    float* bias = room(s.bias, first.n);
    for (size_t c = 0; c < first.n; ++c) bias[c] = c < out ? s.base[c] + first.bias[c] : 0.0f;
    size_t stride = whole;
    for (size_t i = 0; i < byte_layers_.size(); ++i) {
      const Quantised& layer = byte_layers_[i];
      const bool last = i + 1 == byte_layers_.size();
      void* y = last ? static_cast<void*>(room(s.y, rows * layer.n)) : bytes_room(s.bytes2, rows * layer.n);
      serving_.byte_layer(layer.layer(), rows, s.bytes.data(), stride, i ? layer.bias.data() : bias, y, layer.n);
      std::swap(s.bytes, s.bytes2);
      stride = layer.n;
    }
    forward(rest_.back(), rows, s.y.data(), stride, rest_.back().bias.data(), false, logits, 1);
  }

  void add_wide(const Request& r, Scratch& s, float* logits) const {
    if (r.user_wide != 0)
      for (size_t i = 0; i < r.count; ++i) logits[i] += r.user_wide;
    for (const Feature& feature : r.wide) {
      serving_.gather(feature.rows, feature.slots, r.count, room(s.rows, r.count), 1);
      for (size_t i = 0; i < r.count; ++i) logits[i] += s.rows[i];
    }
  }

  uint64_t id_;
  Layers layers_;
  const dense::Kernels& kernels_;
  const dense::ServingKernels& serving_;
  std::vector<Packed> bottom_, rest_, of_features_;
  Packed bottom_items_{0, 0, {}, {}}, once_{0, 0, {}, {}}, each_{0, 0, {}, {}};
  std::vector<std::vector<float>> projections_;
  std::vector<float> by_input_;  // [each.in][each.out]
  std::vector<Quantised> byte_layers_;
  std::vector<float> input_inverse_;
};

}  // namespace rank
