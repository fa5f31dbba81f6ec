// What the ranking stage of a server calls; rank.hpp has the work. Scoring releases the GIL.
#include "rank.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <tuple>

#include "lookup.hpp"

namespace {

using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using AnyRows = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using LinearArrays = std::pair<Matrix, In<float>>;
using Missing = std::vector<size_t>;

rank::Linear linear_of(const Matrix& weights, const In<float>* bias) {
  rank::Linear layer{weights.shape(1), weights.shape(0), {}, {}};
  layer.weights.assign(weights.data(), weights.data() + weights.size());
  if (bias) layer.bias.assign(bias->data(), bias->data() + bias->size());
  return layer;
}

std::vector<rank::Linear> linears_of(const std::vector<LinearArrays>& given) {
  std::vector<rank::Linear> layers;
  for (const auto& [weights, bias] : given) layers.push_back(linear_of(weights, &bias));
  return layers;
}

// One feature of all candidates: either rows of its table by key, or an array with a row for each candidate.
class FeatureArgument {
 public:
  FeatureArgument(nb::handle given, size_t count, size_t dim) : count_(count) {
    if (nb::isinstance<nb::tuple>(given)) {
      const auto table = nb::cast<nb::tuple>(given);
      index_ = table[0].is_none() ? nullptr : nb::cast<const IntLookup*>(table[0]);
      set_rows(nb::cast<AnyRows>(table[1]), table[2], dim);
      const auto keys = nb::cast<In<int64_t>>(table[3]);
      if (keys.size() != count) throw std::invalid_argument("a feature needs a key for each candidate");
      keys_ = keys.data();
    } else {
      set_rows(nb::cast<AnyRows>(given), nb::none(), dim);
      if (num_rows_ != count) throw std::invalid_argument("a feature needs a row for each candidate");
    }
  }

  // Fills slots; whether every key has a row.
  bool find(int64_t* slots) const {
    bool found = true;
    for (size_t start = 0; start < count_; start += IntLookup::BLOCK) {
      const size_t size = std::min(count_ - start, IntLookup::BLOCK);
      if (!keys_) {
        for (size_t i = 0; i < size; ++i) slots[start + i] = static_cast<int64_t>(start + i);
      } else if (index_) {
        index_->find_block(keys_ + start, size, slots + start);
      } else {
        std::copy_n(keys_ + start, size, slots + start);
      }
      for (size_t i = 0; i < size; ++i) found &= static_cast<uint64_t>(slots[start + i]) < num_rows_;
    }
    return found;
  }

  rank::Feature feature(const int64_t* slots) const { return {rows_, slots}; }

 private:
  void set_rows(const AnyRows& rows, nb::handle scales, size_t dim) {
    num_rows_ = rows.shape(0);
    rows_ = {dense::RowType::FLOAT32, rows.data(), nullptr, rows.shape(1)};
    if (rows_.dim != dim) throw std::invalid_argument("a feature's rows have another dim than the layers");
    const auto type = rows.dtype();
    if (type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float) && type.bits == 16) {
      rows_.type = dense::RowType::FLOAT16;
    } else if (type == nb::dtype<int8_t>()) {
      const auto given = nb::cast<In<float>>(scales);
      if (given.size() != num_rows_) throw std::invalid_argument("rows and scales differ in length");
      rows_.type = dense::RowType::INT8, rows_.scales = given.data();
    } else if (type != nb::dtype<float>()) {
      throw std::invalid_argument("rows must be float32, float16 or int8");
    }
  }

  size_t count_, num_rows_ = 0;
  const IntLookup* index_ = nullptr;
  const int64_t* keys_ = nullptr;
  dense::Rows rows_{};
};

// What a request brings, as pointers; the arrays are the caller's.
class RequestArguments {
 public:
  RequestArguments(const rank::Layers& layers, const In<float>& user_numbers, const In<float>& user_vectors,
                   const Matrix& item_numbers, const nb::list& features, float user_wide, const nb::list& wide) {
    if (user_numbers.size() != layers.user_numbers || user_vectors.size() != layers.user_vectors ||
        item_numbers.shape(1) != layers.item_numbers || features.size() != layers.dims.size())
      throw std::invalid_argument("a request needs the numbers, vectors and features that the layers read");
    request.count = item_numbers.shape(0);
    request.user_numbers = user_numbers.data(), request.user_vectors = user_vectors.data();
    request.item_numbers = item_numbers.data(), request.user_wide = user_wide;
    for (size_t f = 0; f < features.size(); ++f) arguments_.emplace_back(features[f], request.count, layers.dims[f]);
    for (nb::handle one : wide) arguments_.emplace_back(one, request.count, 1);
    num_deep_ = features.size();
  }

  // The features of which some key has no row.
  Missing find_rows() {
    Missing missing;
    slots_.reset(new int64_t[arguments_.size() * request.count]);
    for (size_t f = 0; f < arguments_.size(); ++f) {
      int64_t* slots = slots_.get() + f * request.count;
      if (!arguments_[f].find(slots)) missing.push_back(f);
      (f < num_deep_ ? request.features : request.wide).push_back(arguments_[f].feature(slots));
    }
    return missing;
  }

  rank::Request request;

 private:
  std::vector<FeatureArgument> arguments_;
  std::unique_ptr<int64_t[]> slots_;
  size_t num_deep_ = 0;
};

// As torch computes it, and without overflow.
float sigmoid(float logit) {
  const float small = std::exp(-std::fabs(logit));
  return logit >= 0 ? 1 / (1 + small) : small / (1 + small);
}

class Ranker {
 public:
  Ranker(bool is_dot, size_t user_numbers, size_t item_numbers, size_t user_vectors, size_t dim, std::vector<size_t> dims,
         const std::vector<std::optional<Matrix>>& projections, const std::vector<LinearArrays>& bottom, const LinearArrays& once,
         const Matrix& each, const std::vector<LinearArrays>& rest, const std::string& target, const std::string& serving_target)
      : ranker_(layers_of(is_dot, user_numbers, item_numbers, user_vectors, dim, std::move(dims), projections, bottom, once, each, rest),
                target.empty() ? dense::kernels() : dense::kernels(target),
                serving_target.empty() ? dense::serving_kernels() : dense::serving_kernels(serving_target)) {}

  void use_bytes(const In<float>& inputs, const std::vector<In<float>>& hidden) {
    rank::Ranges ranges{{inputs.data(), inputs.data() + inputs.size()}, {}};
    for (const auto& one : hidden) ranges.hidden.emplace_back(one.data(), one.data() + one.size());
    ranker_.use_bytes(ranges);
  }

  // Logits and probabilities, or the features of which some key has no row.
  std::tuple<Out<float>, Out<float>, Missing> rank(const In<float>& user_numbers, const In<float>& user_vectors, const Matrix& item_numbers,
                                                   const nb::list& features, float user_wide, const nb::list& wide) const {
    RequestArguments given(ranker_.layers(), user_numbers, user_vectors, item_numbers, features, user_wide, wide);
    std::vector<float> logits, probabilities;
    Missing missing;
    {
      nb::gil_scoped_release release;
      missing = given.find_rows();
      if (missing.empty()) {
        logits.resize(given.request.count), probabilities.resize(given.request.count);
        ranker_.rank(given.request, logits.data());
        std::transform(logits.begin(), logits.end(), probabilities.begin(), sigmoid);
      }
    }
    return {to_numpy(std::move(logits)), to_numpy(std::move(probabilities)), missing};
  }

  // The largest values of each input of the first layer and of each hidden output, for `use_bytes`; every key must have a row.
  std::tuple<Out<float>, std::vector<Out<float>>> ranges(const In<float>& user_numbers, const In<float>& user_vectors,
                                                         const Matrix& item_numbers, const nb::list& features) const {
    RequestArguments given(ranker_.layers(), user_numbers, user_vectors, item_numbers, features, 0, nb::list());
    if (!given.find_rows().empty()) throw std::invalid_argument("a key has no row");
    const rank::Request& request = given.request;
    const rank::Layers& layers = ranker_.layers();
    std::vector<float> inputs(request.count * layers.each.in);
    ranker_.inputs(request, inputs.data());
    std::vector<std::vector<float>> hidden;
    std::vector<float*> outputs;
    for (const rank::Linear& layer : layers.rest) hidden.emplace_back(request.count * layer.in);
    for (auto& one : hidden) outputs.push_back(one.data());
    ranker_.hidden(request, outputs);
    std::vector<Out<float>> most;
    for (size_t i = 0; i < hidden.size(); ++i) most.push_back(to_numpy(largest(hidden[i], layers.rest[i].in)));
    return {to_numpy(largest(inputs, layers.each.in)), std::move(most)};
  }

 private:
  static std::vector<float> largest(const std::vector<float>& rows, size_t columns) {
    std::vector<float> most(columns);
    for (size_t i = 0; i < rows.size(); ++i) most[i % columns] = std::max(most[i % columns], std::fabs(rows[i]));
    return most;
  }

  static rank::Layers layers_of(bool is_dot, size_t user_numbers, size_t item_numbers, size_t user_vectors, size_t dim,
                                std::vector<size_t> dims, const std::vector<std::optional<Matrix>>& projections,
                                const std::vector<LinearArrays>& bottom, const LinearArrays& once, const Matrix& each,
                                const std::vector<LinearArrays>& rest) {
    rank::Layers layers;
    layers.is_dot = is_dot, layers.user_numbers = user_numbers, layers.item_numbers = item_numbers;
    layers.user_vectors = user_vectors, layers.dim = dim, layers.dims = std::move(dims);
    for (const auto& one : projections)
      layers.projections.push_back(one ? std::vector<float>(one->data(), one->data() + one->size()) : std::vector<float>());
    layers.bottom = linears_of(bottom), layers.rest = linears_of(rest);
    layers.once = linear_of(once.first, &once.second), layers.each = linear_of(each, nullptr);
    return layers;
  }

  rank::Ranker ranker_;
};

}  // namespace

void register_rank(nb::module_& m) {
  nb::class_<Ranker>(m, "Ranker")
      .def(nb::init<bool, size_t, size_t, size_t, size_t, std::vector<size_t>, const std::vector<std::optional<Matrix>>&,
                    const std::vector<LinearArrays>&, const LinearArrays&, const Matrix&, const std::vector<LinearArrays>&,
                    const std::string&, const std::string&>(),
           nb::arg("is_dot"), nb::arg("user_numbers"), nb::arg("item_numbers"), nb::arg("user_vectors"), nb::arg("dim"),
           nb::arg("dims"), nb::arg("projections"), nb::arg("bottom"), nb::arg("once"), nb::arg("each"), nb::arg("rest"),
           nb::arg("target") = "", nb::arg("serving_target") = "")
      .def("use_bytes", &Ranker::use_bytes, nb::arg("inputs"), nb::arg("hidden"))
      .def("rank", &Ranker::rank, nb::arg("user_numbers"), nb::arg("user_vectors"), nb::arg("item_numbers"), nb::arg("features"),
           nb::arg("user_wide"), nb::arg("wide"))
      .def("ranges", &Ranker::ranges, nb::arg("user_numbers"), nb::arg("user_vectors"), nb::arg("item_numbers"),
           nb::arg("features"));
  m.def("serving_targets", [] {
    std::vector<std::string> names;
    for (const dense::ServingKernels* kernels : dense::runnable_serving_kernels()) names.push_back(kernels->name);
    return names;
  });
}
