// What the ranking stage of a server calls; rank.hpp has the work. Scoring releases the GIL.
#include "rank.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <numeric>
#include <string>
#include <tuple>

#include "mapped_tables.hpp"

namespace {

using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using KeyMatrix = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using KnownSlots = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
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
  FeatureArgument(const MappedTable& table, const int64_t* keys) : table_(table), keys_(keys) {}

  static FeatureArgument of(nb::handle given, size_t count) {
    if (!nb::isinstance<nb::tuple>(given)) {
      const FeatureArgument rows(MappedTable(nb::none(), nb::cast<AnyRows>(given), nb::none()), nullptr);
      if (rows.table_.num_rows != count) throw std::invalid_argument("a feature needs a row for each candidate");
      return rows;
    }
    const auto table = nb::cast<nb::tuple>(given);
    const auto keys = nb::cast<In<int64_t>>(table[3]);
    if (keys.size() != count) throw std::invalid_argument("a feature needs a key for each candidate");
    return {MappedTable(table[0], nb::cast<AnyRows>(table[1]), table[2]), keys.data()};
  }

  size_t dim() const { return table_.rows.dim; }

  // Fills slots; whether every key has a row.
  bool find(size_t count, int64_t* slots) const {
    if (keys_) return table_.find(keys_, count, slots);
    std::iota(slots, slots + count, int64_t{0});
    return true;
  }

  rank::Feature feature(const int64_t* slots) const { return {table_.rows, slots}; }

 private:
  MappedTable table_;
  const int64_t* keys_;
};

// Rows of a matrix by index, in chosen columns; behind its last row those of another one, which has been added since.
template <class T, class Array>
void gather_columns(const Array& rows, const Array& added, const int64_t* indices, size_t count, const std::vector<int64_t>& columns,
                    T* to, size_t stride_of_row, size_t stride_of_column) {
  constexpr size_t AHEAD = 12, LINE = 64 / sizeof(T);
  const size_t width = rows.shape(1), num_rows = rows.shape(0);
  const auto row_of = [&](size_t i) {
    const auto index = static_cast<size_t>(indices[i]);
    return index < num_rows ? rows.data() + index * width : added.data() + (index - num_rows) * width;
  };
  for (size_t i = 0; i < count; ++i) {
    if (i + AHEAD < count)
      for (size_t j = 0; j < width; j += LINE) __builtin_prefetch(row_of(i + AHEAD) + j);
    const T* row = row_of(i);
    for (size_t c = 0; c < columns.size(); ++c)
      to[i * stride_of_row + c * stride_of_column] = columns[c] < 0 ? T{} : row[columns[c]];
  }
}

// Where a ranker finds its features of items: keys and numbers by index, and the tables of the keys, those of wide features
// behind the others. A feature without a column of keys is given with each request.
//
// `known` remembers where the rows of an item are: looking 15 keys up takes longer than reading their rows. It has a slot + 1 for each
// table, 0 where nothing is known yet. Requests fill it side by side, all with the same values; whoever changes an item's keys clears it.
class ItemTables {
 public:
  ItemTables(nb::list tables, KeyMatrix keys, In<int64_t> key_columns, Matrix numbers, In<int64_t> number_columns, KnownSlots known)
      : tables(tables), keys(keys), numbers(numbers), key_columns(key_columns.data(), key_columns.data() + key_columns.size()),
        number_columns(number_columns.data(), number_columns.data() + number_columns.size()), known_(known) {
    const size_t num = this->tables.tables.size();
    if (this->key_columns.size() != num || keys.shape(0) != numbers.shape(0) || known.shape(0) != keys.shape(0) || known.shape(1) != num)
      throw std::invalid_argument("each table needs a column of keys and of slots, and each item keys and numbers");
    check(this->key_columns, keys.shape(1), -1);
    check(this->number_columns, numbers.shape(1), 0);
    for (const MappedTable& table : this->tables.tables) fits_ &= table.num_rows < static_cast<size_t>(INT32_MAX);
  }

  // Slots of some items, [table][count]. The tables in which some key has no row are marked, and its slots are not to be used.
  void find(const int64_t* indices, size_t count, const KeyMatrix& added, int64_t* slots, std::vector<char>& is_missing) const {
    constexpr size_t AHEAD = 16;
    std::vector<size_t> unknown;
    for (size_t i = 0; i < count; ++i) {
      if (i + AHEAD < count && static_cast<size_t>(indices[i + AHEAD]) < known_.shape(0)) __builtin_prefetch(known_of(indices[i + AHEAD]));
      if (!read_known(indices[i], slots + i, count)) unknown.push_back(i);
    }
    if (!unknown.empty()) look_up(indices, count, added, unknown, slots, is_missing);
  }

  MappedTables tables;
  KeyMatrix keys;
  Matrix numbers;
  std::vector<int64_t> key_columns, number_columns;

 private:
  static void check(const std::vector<int64_t>& columns, size_t width, int64_t least) {
    for (const int64_t column : columns)
      if (column < least || column >= static_cast<int64_t>(width)) throw std::invalid_argument("there is no such column");
  }

  int32_t* known_of(int64_t index) const { return known_.data() + static_cast<size_t>(index) * known_.shape(1); }

  bool read_known(int64_t index, int64_t* slots, size_t stride) const {
    if (static_cast<size_t>(index) >= known_.shape(0)) return false;
    const int32_t* known = known_of(index);
    for (size_t t = 0; t < known_.shape(1); ++t) {
      const int32_t one = __atomic_load_n(known + t, __ATOMIC_RELAXED);
      if (!one) return false;
      slots[t * stride] = one - 1;
    }
    return true;
  }

  void look_up(const int64_t* indices, size_t count, const KeyMatrix& added, const std::vector<size_t>& unknown, int64_t* slots,
               std::vector<char>& is_missing) const {
    const size_t num = tables.tables.size(), size = unknown.size();
    std::vector<int64_t> items(size), item_keys(num * size), found(size);
    std::vector<char> is_whole(size, 1);
    for (size_t j = 0; j < size; ++j) items[j] = indices[unknown[j]];
    gather_columns(keys, added, items.data(), size, key_columns, item_keys.data(), 1, size);
    for (size_t t = 0; t < num; ++t) {
      const MappedTable& table = tables.tables[t];
      if (key_columns[t] < 0) std::fill(found.begin(), found.end(), 0);
      else table.find(item_keys.data() + t * size, size, found.data());
      for (size_t j = 0; j < size; ++j) {
        slots[t * count + unknown[j]] = found[j];
        if (key_columns[t] >= 0 && static_cast<uint64_t>(found[j]) >= table.num_rows) is_missing[t] = 1, is_whole[j] = 0;
      }
    }
    for (size_t j = 0; j < size && fits_; ++j)
      if (is_whole[j] && static_cast<size_t>(items[j]) < known_.shape(0))
        for (size_t t = 0; t < num; ++t)
          __atomic_store_n(known_of(items[j]) + t, static_cast<int32_t>(slots[t * count + unknown[j]] + 1), __ATOMIC_RELAXED);
  }

  KnownSlots known_;
  bool fits_ = true;
};

// What a request brings, as pointers; the arrays are the caller's.
class RequestArguments {
 public:
  RequestArguments(const rank::Layers& layers, const In<float>& user_numbers, const In<float>& user_vectors, float user_wide,
                   size_t count)
      : layers_(layers) {
    if (user_numbers.size() != layers.user_numbers || user_vectors.size() != layers.user_vectors)
      throw std::invalid_argument("a request needs the numbers and vectors of the user that the layers read");
    request.count = count, request.user_wide = user_wide;
    request.user_numbers = user_numbers.data(), request.user_vectors = user_vectors.data();
  }

  void set_items(const Matrix& numbers, const nb::list& features, const nb::list& wide) {
    if (numbers.shape(1) != layers_.item_numbers || features.size() != layers_.dims.size())
      throw std::invalid_argument("a request needs the numbers and features of items that the layers read");
    request.item_numbers = numbers.data();
    for (nb::handle one : features) arguments_.push_back(FeatureArgument::of(one, request.count));
    for (nb::handle one : wide) arguments_.push_back(FeatureArgument::of(one, request.count));
  }

  // Items by index; `given` has (number of a feature, a row for each item) for what is not to be read from its table.
  void set_items(const ItemTables& items, const In<int64_t>& indices, const KeyMatrix& added_keys, const Matrix& added_numbers,
                 const nb::list& given) {
    const size_t num = items.tables.tables.size(), num_items = items.keys.shape(0) + added_keys.shape(0);
    if (items.number_columns.size() != layers_.item_numbers || num < layers_.dims.size())
      throw std::invalid_argument("the tables of items are of other layers");
    if (added_keys.shape(1) != items.keys.shape(1) || added_numbers.shape(1) != items.numbers.shape(1) ||
        added_keys.shape(0) != added_numbers.shape(0))
      throw std::invalid_argument("items that were added have the columns of the others");
    for (size_t i = 0; i < indices.size(); ++i)
      if (static_cast<uint64_t>(indices.data()[i]) >= num_items) throw std::invalid_argument("there is no item of this index");
    numbers_.reset(new float[layers_.item_numbers * request.count]);
    items_ = &items, indices_ = indices.data(), added_keys_ = &added_keys, added_numbers_ = &added_numbers;
    for (size_t t = 0; t < num; ++t) arguments_.emplace_back(items.tables.tables[t], nullptr);
    is_given_.assign(num, 0);
    for (nb::handle one : given) {
      const auto [number, rows] = nb::cast<std::pair<size_t, nb::object>>(one);
      if (number >= num) throw std::invalid_argument("there is no feature of this number");
      arguments_[number] = FeatureArgument::of(rows, request.count), is_given_[number] = 1;
    }
    request.item_numbers = numbers_.get();
  }

  // The features of which some key has no row.
  Missing find_rows() {
    for (size_t f = 0; f < arguments_.size(); ++f)
      if (f < layers_.dims.size() ? arguments_[f].dim() != layers_.dims[f] : arguments_[f].dim() != 1)
        throw std::invalid_argument("a feature's rows have another dim than the layers");
    slots_.reset(new int64_t[arguments_.size() * request.count]);
    std::vector<char> is_missing(arguments_.size(), 0);
    if (items_) find_stored(is_missing);
    Missing missing;
    for (size_t f = 0; f < arguments_.size(); ++f) {
      int64_t* slots = slots_.get() + f * request.count;
      if (!items_ || is_given_[f]) is_missing[f] = !arguments_[f].find(request.count, slots);
      if (is_missing[f]) missing.push_back(f);
      (f < layers_.dims.size() ? request.features : request.wide).push_back(arguments_[f].feature(slots));
    }
    return missing;
  }

  rank::Request request;

 private:
  const rank::Layers& layers_;
  std::vector<FeatureArgument> arguments_;
  std::vector<char> is_given_;
  const ItemTables* items_ = nullptr;  // null: keys are given for all features
  const int64_t* indices_ = nullptr;
  const KeyMatrix* added_keys_ = nullptr;
  const Matrix* added_numbers_ = nullptr;
  std::unique_ptr<int64_t[]> slots_;
  std::unique_ptr<float[]> numbers_;

  void find_stored(std::vector<char>& is_missing) {
    items_->find(indices_, request.count, *added_keys_, slots_.get(), is_missing);
    gather_columns(items_->numbers, *added_numbers_, indices_, request.count, items_->number_columns, numbers_.get(), layers_.item_numbers, 1);
    for (size_t f = 0; f < is_missing.size(); ++f)
      if (items_->key_columns[f] < 0) is_missing[f] = 1;  // unless it is given
  }
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
    RequestArguments given(ranker_.layers(), user_numbers, user_vectors, user_wide, item_numbers.shape(0));
    given.set_items(item_numbers, features, wide);
    return ranked(given);
  }

  // The same for items by index.
  std::tuple<Out<float>, Out<float>, Missing> rank_items(const In<float>& user_numbers, const In<float>& user_vectors, float user_wide,
                                                         const ItemTables& items, const In<int64_t>& indices, const KeyMatrix& added_keys,
                                                         const Matrix& added_numbers, const nb::list& rows) const {
    RequestArguments given(ranker_.layers(), user_numbers, user_vectors, user_wide, indices.size());
    given.set_items(items, indices, added_keys, added_numbers, rows);
    return ranked(given);
  }

  // The largest values of each input of the first layer and of each hidden output, for `use_bytes`; every key must have a row.
  std::tuple<Out<float>, std::vector<Out<float>>> ranges(const In<float>& user_numbers, const In<float>& user_vectors,
                                                         const Matrix& item_numbers, const nb::list& features) const {
    RequestArguments given(ranker_.layers(), user_numbers, user_vectors, 0, item_numbers.shape(0));
    given.set_items(item_numbers, features, nb::list());
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
  std::tuple<Out<float>, Out<float>, Missing> ranked(RequestArguments& given) const {
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
  nb::class_<ItemTables>(m, "ItemTables")
      .def(nb::init<nb::list, KeyMatrix, In<int64_t>, Matrix, In<int64_t>, KnownSlots>(), nb::arg("tables"), nb::arg("keys"),
           nb::arg("key_columns"), nb::arg("numbers"), nb::arg("number_columns"), nb::arg("known"));
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
      .def("rank_items", &Ranker::rank_items, nb::arg("user_numbers"), nb::arg("user_vectors"), nb::arg("user_wide"), nb::arg("items"),
           nb::arg("indices"), nb::arg("added_keys"), nb::arg("added_numbers"), nb::arg("rows"))
      .def("ranges", &Ranker::ranges, nb::arg("user_numbers"), nb::arg("user_vectors"), nb::arg("item_numbers"),
           nb::arg("features"));
  m.def("serving_targets", [] {
    std::vector<std::string> names;
    for (const dense::ServingKernels* kernels : dense::runnable_serving_kernels()) names.push_back(kernels->name);
    return names;
  });
}
