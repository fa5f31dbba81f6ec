// Embedding tables for Python: many tables in one call, without the GIL. What they do is in embedding_table.hpp.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <limits>

#include "arrays.hpp"
#include "embedding_parallel.hpp"
#include "embedding_request.hpp"
#include "embedding_table.hpp"

namespace {

using namespace embedding;

using Tables = std::vector<std::shared_ptr<Table>>;
template <class T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::device::cpu>;
template <class T>
using InMatrix = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using OutMatrix = nb::ndarray<nb::numpy, T, nb::ndim<2>>;

template <class T>
OutMatrix<T> to_matrix(std::vector<T>&& values, size_t rows, size_t columns) {
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return OutMatrix<T>(owned->data(), {rows, columns}, owner);
}

// A batch resolved by one table.
struct PyLookup {
  std::shared_ptr<Table> table;
  Lookup lookup;
};
using Lookups = std::vector<std::shared_ptr<PyLookup>>;

uint32_t checked_step(int64_t step) {
  if (step < 0 || step > int64_t{std::numeric_limits<uint32_t>::max()})
    throw std::invalid_argument("step must be within 0..4294967295, got " + std::to_string(step));
  return static_cast<uint32_t>(step);
}

void check_offsets(const Segment& segment, size_t entries) {
  const int64_t* offsets = segment.offsets;
  if (entries == 0 || offsets[0] != 0 || offsets[entries - 1] != static_cast<int64_t>(segment.num_keys))
    throw std::invalid_argument("offsets must start at 0 and end at the number of keys, " + std::to_string(segment.num_keys));
  for (size_t i = 1; i < entries; ++i)
    if (offsets[i] < offsets[i - 1]) throw std::invalid_argument("offsets must not decrease; entry " + std::to_string(i) + " does");
}

// Segments grouped by table, with the arrays they point into.
struct Segments {
  std::vector<std::vector<Segment>> of_table;
  std::vector<In<int64_t>> ints;
  std::vector<In<float>> weights;
  std::vector<Matrix<const float>> matrices;

  Segments(const nb::list& given, const std::vector<Table*>& tables, bool writes) : of_table(tables.size()) {
    for (nb::handle item : given) {
      const auto parts = nb::cast<nb::tuple>(item);
      if (parts.size() != 6) throw std::invalid_argument("a segment is (table, keys, offsets, weights, mode, rows)");
      Segment segment;
      segment.table = nb::cast<size_t>(parts[0]);
      if (segment.table >= tables.size()) throw std::invalid_argument("a segment names a table that was not given");
      read_keys(segment, parts);
      if (!parts[5].is_none()) read_rows(segment, parts[5], tables[segment.table]->options.dim, writes);
      of_table[segment.table].push_back(segment);
    }
  }

 private:
  void read_keys(Segment& segment, const nb::tuple& parts) {
    ints.push_back(nb::cast<In<int64_t>>(parts[1], false));
    segment.keys = ints.back().data();
    segment.num_keys = segment.num_rows = ints.back().size();
    if (segment.num_keys >= ABSENT) throw std::invalid_argument("a batch must have fewer than 2^32 keys");
    segment.mode = static_cast<Mode>(nb::cast<int>(parts[4]));
    if (!parts[2].is_none()) {
      if (segment.mode == Mode::none) throw std::invalid_argument("offsets need pooling: sum or mean");
      ints.push_back(nb::cast<In<int64_t>>(parts[2], false));
      segment.offsets = ints.back().data();
      check_offsets(segment, ints.back().size());
      segment.num_rows = ints.back().size() - 1;
    }
    if (parts[3].is_none()) return;
    weights.push_back(nb::cast<In<float>>(parts[3], false));
    if (weights.back().size() != segment.num_keys)
      throw std::invalid_argument("there must be one weight per key: " + std::to_string(segment.num_keys) + " keys, " +
                                  std::to_string(weights.back().size()) + " weights");
    segment.weights = weights.back().data();
  }

  void read_rows(Segment& segment, nb::handle given, size_t dim, bool writes) {
    if (writes) nb::cast<Matrix<float>>(given, false);  // refuses read-only arrays
    matrices.push_back(nb::cast<Matrix<const float>>(given, false));
    const Matrix<const float>& rows = matrices.back();
    if (rows.shape(0) != segment.num_rows || rows.shape(1) != dim)
      throw std::invalid_argument("rows must have shape (" + std::to_string(segment.num_rows) + ", " + std::to_string(dim) +
                                  "), got (" + std::to_string(rows.shape(0)) + ", " + std::to_string(rows.shape(1)) + ")");
    if (dim > 1 && segment.num_rows > 0 && rows.stride(1) != 1) throw std::invalid_argument("the values of a row must be next to each other");
    segment.data = const_cast<float*>(rows.data());
    segment.stride = static_cast<size_t>(rows.stride(0));
  }
};

std::vector<Table*> tables_of(const Lookups& lookups) {
  std::vector<Table*> tables;
  for (const auto& lookup : lookups) tables.push_back(lookup->table.get());
  return tables;
}

std::vector<Table*> pointers_to(const Tables& tables) {
  std::vector<Table*> pointers;
  for (const auto& table : tables) pointers.push_back(table.get());
  return pointers;
}

void check_sizes(const Lookups& lookups, const std::vector<std::vector<Segment>>& segments, bool needs_rows) {
  for (size_t i = 0; i < lookups.size(); ++i) {
    size_t size = 0;
    for (const Segment& segment : segments[i]) {
      size += segment.num_keys;
      if (needs_rows && !segment.data) throw std::invalid_argument("every segment needs gradients");
    }
    if (size != lookups[i]->lookup.inverse.size())
      throw std::invalid_argument("the segments have " + std::to_string(size) + " keys, but " +
                                  std::to_string(lookups[i]->lookup.inverse.size()) + " were looked up");
  }
}

void check_keys(const Tables& tables, const std::vector<std::vector<Segment>>& segments) {
  for (size_t i = 0; i < tables.size(); ++i)
    for (const Segment& segment : segments[i]) tables[i]->check_keys(segment.keys, segment.num_keys);
}

Lookups lookup_segments(const Tables& tables, const std::vector<std::vector<Segment>>& segments, bool train, uint32_t step,
                        int num_threads) {
  Lookups lookups;
  for (const auto& table : tables) lookups.push_back(std::make_shared<PyLookup>(PyLookup{table, {}}));
  nb::gil_scoped_release release;
  check_keys(tables, segments);
  for_items(tables.size(), num_threads, [&](size_t i, int threads) {
    lookups[i]->lookup = tables[i]->lookup(segments[i], train, step, threads);
  });
  return lookups;
}

Lookups lookup_tables(const Tables& tables, const nb::list& given, bool train, int64_t step, int num_threads) {
  const Segments segments(given, pointers_to(tables), true);
  return lookup_segments(tables, segments.of_table, train, checked_step(step), num_threads);
}

void pool_tables(const Lookups& lookups, const nb::list& given, int num_threads) {
  const Segments segments(given, tables_of(lookups), true);
  check_sizes(lookups, segments.of_table, false);
  nb::gil_scoped_release release;
  for_items(lookups.size(), num_threads, [&](size_t i, int threads) {
    lookups[i]->table->pool(lookups[i]->lookup, segments.of_table[i], threads);
  });
}

// All gradients are summed and checked before the first row of the first table changes.
void update_segments(const Lookups& lookups, const std::vector<std::vector<Segment>>& segments, float learning_rate,
                     int64_t step, int num_threads) {
  checked_step(step);
  if (!(learning_rate >= 0.0f && std::isfinite(learning_rate)))
    throw std::invalid_argument("learning_rate must be a number from 0 on, got " + std::to_string(learning_rate));
  for (const auto& lookup : lookups) {
    const Options& options = lookup->table->options;
    if (learning_rate == 0.0f && options.optimizer.kind == Optimizer::ftrl)
      throw std::invalid_argument("Table \"" + options.name + "\": ftrl divides by the learning rate, so it must not be 0");
  }
  nb::gil_scoped_release release;
  std::vector<std::vector<float>> sums(lookups.size());
  for_items(lookups.size(), num_threads, [&](size_t i, int threads) {
    sums[i] = lookups[i]->table->sum_gradients(lookups[i]->lookup, segments[i], threads);
  });
  for_items(lookups.size(), num_threads, [&](size_t i, int threads) {
    lookups[i]->table->update(lookups[i]->lookup, sums[i], learning_rate, step, threads);
  });
}

void update_tables(const Lookups& lookups, const nb::list& given, float learning_rate, int64_t step, int num_threads) {
  const Segments segments(given, tables_of(lookups), false);
  check_sizes(lookups, segments.of_table, true);
  update_segments(lookups, segments.of_table, learning_rate, step, num_threads);
}

// --- several workers, each with a part of every table's keys -----------------------------------------------------------

struct PyRequest {
  Tables tables;
  Request request;
};

std::shared_ptr<PyRequest> request_of(const Tables& tables, const nb::list& given, size_t num_owners, int num_threads) {
  if (num_owners == 0) throw std::invalid_argument("num_owners must be at least 1, got 0");
  const Segments segments(given, pointers_to(tables), false);
  auto asked = std::make_shared<PyRequest>(PyRequest{tables, {}});
  nb::gil_scoped_release release;
  check_keys(tables, segments.of_table);
  asked->request = request_keys(pointers_to(tables), segments.of_table, num_owners, num_threads);
  return asked;
}

// Segments must be those of the request; rows are one for each of its keys.
void check_request(const PyRequest& asked, const Segments& segments, size_t num_rows, size_t dim) {
  for (size_t t = 0; t < asked.tables.size(); ++t) {
    size_t size = 0;
    for (const Segment& segment : segments.of_table[t]) size += segment.num_keys;
    if (size != asked.request.inverse[t].size() || dim != asked.tables[t]->options.dim)
      throw std::invalid_argument("the segments are not those that were asked for");
  }
  if (num_rows != asked.request.keys.size())
    throw std::invalid_argument("there must be one row for each of the " + std::to_string(asked.request.keys.size()) +
                                " keys asked for, got " + std::to_string(num_rows));
}

void pool_rows(const PyRequest& asked, const nb::list& given, InMatrix<float> rows, int num_threads) {
  const Segments segments(given, pointers_to(asked.tables), true);
  check_request(asked, segments, rows.shape(0), rows.shape(1));
  nb::gil_scoped_release release;
  pool_request(asked.request, segments.of_table, rows.data(), rows.shape(1), num_threads);
}

OutMatrix<float> sum_gradients(const PyRequest& asked, const nb::list& given, size_t dim, int num_threads) {
  const Segments segments(given, pointers_to(asked.tables), false);
  const size_t size = asked.request.keys.size();
  check_request(asked, segments, size, dim);
  for (const auto& of_table : segments.of_table)
    for (const Segment& segment : of_table)
      if (!segment.data) throw std::invalid_argument("every segment needs gradients");
  std::vector<float> sums(size * dim, 0.0f);
  {
    nb::gil_scoped_release release;
    sum_request(asked.request, segments.of_table, sums.data(), dim, num_threads);
  }
  return to_matrix(std::move(sums), size, dim);
}

// What workers asked of this one's tables: sizes [worker][table], and arrays in that order.
std::vector<std::vector<Segment>> parts_of(const std::vector<Table*>& tables, const InMatrix<int64_t>& sizes,
                                           const int64_t* keys, const uint32_t* counts, float* rows, size_t num_keys) {
  std::vector<std::vector<Segment>> parts(tables.size());
  if (sizes.shape(1) != tables.size()) throw std::invalid_argument("sizes must have one column for each table");
  size_t first = 0;
  for (size_t worker = 0; worker < sizes.shape(0); ++worker) {
    for (size_t t = 0; t < tables.size(); ++t) {
      Segment segment;
      segment.table = t;
      segment.num_keys = segment.num_rows = static_cast<size_t>(sizes.data()[worker * tables.size() + t]);
      if (segment.num_keys > num_keys - first) throw std::invalid_argument("sizes must add up to the number of keys");
      segment.keys = keys ? keys + first : nullptr;
      segment.counts = counts ? counts + first : nullptr;
      segment.stride = tables[t]->options.dim;
      segment.data = rows ? rows + first * segment.stride : nullptr;
      first += segment.num_keys;
      parts[t].push_back(segment);
    }
  }
  if (first != num_keys) throw std::invalid_argument("sizes must add up to the number of keys");
  return parts;
}

void check_dims(const std::vector<Table*>& tables, size_t num_rows, size_t num_keys, size_t dim) {
  for (const Table* table : tables)
    if (table->options.dim != dim || num_rows != num_keys)
      throw std::invalid_argument("rows must have shape (" + std::to_string(num_keys) + ", " +
                                  std::to_string(table->options.dim) + ")");
}

Lookups lookup_parts(const Tables& tables, InMatrix<int64_t> sizes, In<int64_t> keys, In<uint32_t> counts, bool train,
                     int64_t step, nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu> rows, int num_threads) {
  if (counts.size() != keys.size()) throw std::invalid_argument("there must be one count per key");
  const std::vector<Table*> pointers = pointers_to(tables);
  check_dims(pointers, rows.shape(0), keys.size(), rows.shape(1));
  const auto parts = parts_of(pointers, sizes, keys.data(), counts.data(), rows.data(), keys.size());
  return lookup_segments(tables, parts, train, checked_step(step), num_threads);
}

void update_parts(const Lookups& lookups, InMatrix<int64_t> sizes, InMatrix<float> grads, float learning_rate, int64_t step,
                  int num_threads) {
  const std::vector<Table*> pointers = tables_of(lookups);
  check_dims(pointers, grads.shape(0), grads.shape(0), grads.shape(1));
  const auto parts = parts_of(pointers, sizes, nullptr, nullptr, const_cast<float*>(grads.data()), grads.shape(0));
  check_sizes(lookups, parts, false);
  update_segments(lookups, parts, learning_rate, step, num_threads);
}

Out<uint32_t> owners_of(const Table& table, In<int64_t> keys, size_t num_owners) {
  if (num_owners == 0) throw std::invalid_argument("num_owners must be at least 1, got 0");
  std::vector<uint32_t> owners(keys.size());
  for (size_t i = 0; i < owners.size(); ++i) owners[i] = static_cast<uint32_t>(owner_of(keys.data()[i], table.options, num_owners));
  return to_numpy(std::move(owners));
}

class Snapshot {
 public:
  Snapshot(std::shared_ptr<Table> table, bool delta) : table_(std::move(table)) {
    nb::gil_scoped_release release;
    id_ = table_->begin_snapshot(delta, removed_, waiting_);
  }
  ~Snapshot() { table_->abandon_snapshot(id_); }
  Snapshot(const Snapshot&) = delete;

  Out<int64_t> removed() const { return to_numpy(std::vector<int64_t>(removed_)); }

  nb::tuple waiting() const {
    Waiting copy = waiting_;
    const size_t shared = table_->options.shared_rows;
    return nb::make_tuple(to_numpy(std::move(copy.keys)), to_numpy(std::move(copy.counts)), to_numpy(std::move(copy.steps)),
                          to_numpy(std::move(copy.bloom)), to_matrix(std::move(copy.shared_rows), shared, table_->options.dim),
                          to_matrix(std::move(copy.shared_states), shared, table_->num_states));
  }

  nb::object next_piece() {
    Piece piece;
    {
      nb::gil_scoped_release release;
      if (!table_->next_piece(id_, piece)) piece = Piece();
    }
    if (piece.keys.empty()) return nb::none();
    const size_t size = piece.keys.size();
    return nb::make_tuple(to_numpy(std::move(piece.keys)), to_matrix(std::move(piece.rows), size, table_->options.dim),
                          to_matrix(std::move(piece.states), size, table_->num_states), to_numpy(std::move(piece.counts)),
                          to_numpy(std::move(piece.steps)));
  }

  void close() {
    nb::gil_scoped_release release;
    table_->abandon_snapshot(id_);
  }

 private:
  std::shared_ptr<Table> table_;
  uint64_t id_ = 0;
  std::vector<int64_t> removed_;
  Waiting waiting_;
};

void load(Table& table, In<int64_t> keys, InMatrix<float> rows, InMatrix<float> states, In<uint32_t> counts, In<uint32_t> steps) {
  const size_t size = keys.size();
  const bool fits = rows.shape(0) == size && states.shape(0) == size && counts.size() == size && steps.size() == size &&
                    rows.shape(1) == table.options.dim && states.shape(1) == table.num_states;
  if (!fits)
    throw std::invalid_argument("Table \"" + table.options.name + "\": rows must have shape (keys, " +
                                std::to_string(table.options.dim) + ") and states (keys, " + std::to_string(table.num_states) +
                                "), with one count and one step per key");
  nb::gil_scoped_release release;
  table.load(keys.data(), rows.data(), states.data(), counts.data(), steps.data(), size);
}

void load_waiting(Table& table, In<int64_t> keys, In<uint32_t> counts, In<uint32_t> steps, In<uint16_t> bloom,
                  InMatrix<float> shared_rows, InMatrix<float> shared_states) {
  if (counts.size() != keys.size() || steps.size() != keys.size())
    throw std::invalid_argument("there must be one count and one step per waiting key");
  Waiting waiting{{keys.data(), keys.data() + keys.size()}, {counts.data(), counts.data() + counts.size()},
                  {steps.data(), steps.data() + steps.size()}, {bloom.data(), bloom.data() + bloom.size()},
                  {shared_rows.data(), shared_rows.data() + shared_rows.size()},
                  {shared_states.data(), shared_states.data() + shared_states.size()}};
  nb::gil_scoped_release release;
  table.load_waiting(waiting);
}

nb::dict statistics(Table& table) {
  Statistics found{};
  {
    nb::gil_scoped_release release;
    found = table.statistics();
  }
  nb::dict answer;
  answer["keys"] = found.keys;
  answer["record_bytes"] = found.record_bytes;
  answer["resident_bytes"] = found.resident_bytes;
  answer["disk_bytes"] = found.disk_bytes;
  answer["index_bytes"] = found.index_bytes;
  answer["admission_bytes"] = found.admission_bytes;
  answer["admitted"] = found.admitted;
  answer["evicted"] = found.evicted;
  answer["hits"] = found.hits;
  answer["misses"] = found.misses;
  answer["waiting"] = found.waiting;
  return answer;
}

std::shared_ptr<Table> make_table(const std::string& name, size_t dim, int64_t num_rows, float init_scale, uint64_t seed,
                                  const std::string& optimizer, const nb::dict& parameters, uint32_t admit_after,
                                  size_t bloom_counters, size_t shared_rows, std::shared_ptr<Disk> disk,
                                  int64_t num_owners) {
  Options options;
  options.name = name;
  options.dim = dim;
  options.num_rows = num_rows;
  options.init_scale = init_scale;
  options.seed = seed;
  options.admit_after = admit_after;
  options.bloom_counters = bloom_counters;
  options.shared_rows = shared_rows;
  options.num_owners = num_owners;
  OptimizerOptions& o = options.optimizer;
  o.kind = optimizer_named(optimizer);
  const auto number = [&](const char* key, double fallback) {
    return parameters.contains(key) ? nb::cast<double>(parameters[key]) : fallback;
  };
  o.eps = static_cast<float>(number("eps", o.eps));
  o.initial_accumulator = static_cast<float>(number("initial_accumulator", o.initial_accumulator));
  o.weight_decay = static_cast<float>(number("weight_decay", o.weight_decay));
  o.beta1 = number("beta1", o.beta1);
  o.beta2 = number("beta2", o.beta2);
  o.l1 = static_cast<float>(number("l1", o.l1));
  o.l2 = static_cast<float>(number("l2", o.l2));
  o.beta = static_cast<float>(number("beta", o.beta));
  o.decay_rate = number("decay_rate", o.decay_rate);
  o.decay_period = static_cast<int64_t>(number("decay_period", static_cast<double>(o.decay_period)));
  return std::make_shared<Table>(std::move(options), std::move(disk));
}

template <class Call>
auto without_gil(Call call) {
  nb::gil_scoped_release release;
  return call();
}

}  // namespace

void register_embedding(nb::module_& m) {
  nb::register_exception_translator([](const std::exception_ptr& failure, void*) {
    try {
      std::rethrow_exception(failure);
    } catch (const DiskError& error) {
      PyErr_SetObject(PyExc_OSError, nb::make_tuple(error.code, error.what()).ptr());
    }
  });
  nb::class_<Disk>(m, "EmbeddingDisk").def(nb::init<const std::string&, size_t>());
  nb::class_<Table>(m, "EmbeddingTable")
      .def_prop_ro("num_states", [](const Table& t) { return t.num_states; })
      .def("evict_older_than", [](Table& t, int64_t step) { return without_gil([&] { return t.evict_older_than(step); }); })
      .def("evict_smaller_than", [](Table& t, double norm) { return without_gil([&] { return t.evict_smaller_than(norm); }); })
      .def("evict_to", [](Table& t, size_t capacity) { return without_gil([&] { return t.evict_to(capacity); }); })
      .def("least_frequent", [](Table& t, size_t size) {
        Piece least = without_gil([&] { return t.least_frequent(size); });
        return nb::make_tuple(to_numpy(std::move(least.keys)), to_numpy(std::move(least.counts)), to_numpy(std::move(least.steps)));
      })
      .def("owners_of", &owners_of)
      .def("remove", [](Table& t, In<int64_t> keys) { return without_gil([&] { return t.remove(keys.data(), keys.size()); }); })
      .def("mark_saved", [](Table& t) { without_gil([&] { t.mark_saved(); }); })
      .def("load", &load)
      .def("load_waiting", &load_waiting)
      .def("statistics", &statistics);
  nb::class_<PyLookup>(m, "EmbeddingLookup")
      .def_prop_ro("unique_keys", [](const PyLookup& l) { return to_numpy(std::vector<int64_t>(l.lookup.keys)); }, nb::rv_policy::move)
      .def_prop_ro("inverse", [](const PyLookup& l) { return to_numpy(std::vector<uint32_t>(l.lookup.inverse)); }, nb::rv_policy::move);
  nb::class_<Snapshot>(m, "EmbeddingSnapshot")
      .def(nb::init<std::shared_ptr<Table>, bool>())
      .def_prop_ro("removed", &Snapshot::removed, nb::rv_policy::move)
      .def_prop_ro("waiting", &Snapshot::waiting)
      .def("next_piece", &Snapshot::next_piece)
      .def("close", &Snapshot::close);
  m.def("embedding_table", &make_table, nb::arg("name"), nb::arg("dim"), nb::arg("num_rows"), nb::arg("init_scale"),
        nb::arg("seed"), nb::arg("optimizer"), nb::arg("parameters"), nb::arg("admit_after"), nb::arg("bloom_counters"),
        nb::arg("shared_rows"), nb::arg("disk").none(), nb::arg("num_owners") = 1);
  m.def("lookup_tables", &lookup_tables);
  m.def("pool_tables", &pool_tables);
  m.def("update_tables", &update_tables);
  nb::class_<PyRequest>(m, "EmbeddingRequest")
      .def_prop_ro("keys", [](const PyRequest& r) { return to_numpy(std::vector<int64_t>(r.request.keys)); }, nb::rv_policy::move)
      .def_prop_ro("counts", [](const PyRequest& r) { return to_numpy(std::vector<uint32_t>(r.request.counts)); }, nb::rv_policy::move)
      .def_prop_ro("sizes", [](const PyRequest& r) {
        return to_matrix(std::vector<int64_t>(r.request.sizes), r.tables.empty() ? 0 : r.request.sizes.size() / r.tables.size(), r.tables.size());
      }, nb::rv_policy::move);
  m.def("request_keys", &request_of);
  m.def("pool_rows", &pool_rows);
  m.def("sum_gradients", &sum_gradients);
  m.def("lookup_parts", &lookup_parts);
  m.def("update_parts", &update_parts);
}
