// Dense layers for Python: MLPs in one call each way, and the speed of single kernels.
#include "dense/mlp.hpp"

#include <time.h>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>

#include "arrays.hpp"

namespace {

using Matrix = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using InMatrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void check(bool holds, const std::string& found) {
  if (!holds) throw std::invalid_argument(found);
}

std::string shape_of(size_t rows, size_t columns) {
  return "[" + std::to_string(rows) + ", " + std::to_string(columns) + "]";
}

template <class T>
void check_shape(const T& matrix, size_t rows, size_t columns, const char* what) {
  check(matrix.shape(0) == rows && matrix.shape(1) == columns,
        std::string(what) + " must be " + shape_of(rows, columns) + ", got " + shape_of(matrix.shape(0), matrix.shape(1)));
}

dense::PackedMlp make_mlp(const std::vector<size_t>& sizes, const std::vector<bool>& relus, bool trains,
                          const std::string& target) {
  check(sizes.size() == relus.size() + 1, "an MLP needs one size more than it has layers");
  std::vector<dense::LayerShape> shapes;
  for (size_t i = 0; i < relus.size(); ++i) shapes.push_back({sizes[i], sizes[i + 1], relus[i]});
  return dense::PackedMlp(std::move(shapes), trains, target.empty() ? dense::kernels() : dense::kernels(target));
}

void pack_layer(dense::PackedMlp& mlp, size_t layer, InMatrix weights, In<float> bias) {
  check(layer < mlp.shapes().size(), "there is no layer " + std::to_string(layer));
  const auto [in, out, relu] = mlp.shapes()[layer];
  check_shape(weights, out, in, "weights");
  check(bias.size() == out, "a bias needs one value for each output of its layer");
  nb::gil_scoped_release release;
  mlp.pack(layer, weights.data(), bias.data());
}

void pack(dense::PackedMlp& mlp, const std::vector<InMatrix>& weights, const std::vector<In<float>>& biases) {
  const size_t size = mlp.shapes().size();
  check(weights.size() == size && biases.size() == size, "weights and biases must be as many as layers");
  for (size_t i = 0; i < size; ++i) pack_layer(mlp, i, weights[i], biases[i]);
}

// Features whose ids repeat in some rows.
struct PyRepeats {
  size_t rows, width;
  dense::RepeatedIds ids;
};

// Without ids: a feature that has not just one for each row.
std::optional<PyRepeats> find_repeats(const std::vector<std::optional<In<int64_t>>>& ids, size_t width) {
  PyRepeats repeats{0, width, {}};
  std::vector<const int64_t*> pointers;
  for (const auto& of_feature : ids) {
    pointers.push_back(of_feature ? of_feature->data() : nullptr);
    if (!of_feature) continue;
    check(repeats.rows == 0 || of_feature->size() == repeats.rows, "every feature needs an id for each row");
    repeats.rows = of_feature->size();
  }
  nb::gil_scoped_release release;
  repeats.ids = dense::find_repeats(repeats.rows, pointers, width);
  if (repeats.ids.features.empty()) return std::nullopt;
  return repeats;
}

// Of an MLP's inputs, where features begin at this column; null if there are none.
std::optional<dense::Repeats> repeats_of(const PyRepeats* repeats, size_t begin, size_t rows, size_t in) {
  if (!repeats) return std::nullopt;
  check(repeats->rows == rows, "repeats are those of " + std::to_string(repeats->rows) + " rows, got " + std::to_string(rows));
  check(begin + (repeats->ids.features.back().feature + 1) * repeats->width <= in, "repeats go beyond the inputs");
  return dense::Repeats{repeats->ids, begin, repeats->width};
}

void forward(const dense::PackedMlp& mlp, InMatrix inputs, Matrix outputs, std::optional<InOut<float>> hidden,
             const PyRepeats* repeats, size_t begin) {
  const size_t rows = inputs.shape(0);
  check_shape(inputs, rows, mlp.in(), "inputs");
  check_shape(outputs, rows, mlp.out(), "outputs");
  check(!hidden || hidden->size() == mlp.hidden_size(rows), "hidden needs hidden_size(rows) floats");
  const auto repeated = repeats_of(repeats, begin, rows, mlp.in());
  check(hidden || !repeated, "repeats need hidden");
  nb::gil_scoped_release release;
  if (hidden)
    mlp.forward(rows, inputs.data(), mlp.in(), outputs.data(), mlp.out(), hidden->data(), repeated ? &*repeated : nullptr);
  else mlp.forward(rows, inputs.data(), mlp.in(), outputs.data(), mlp.out());
}

void backward(const dense::PackedMlp& mlp, InMatrix inputs, In<float> hidden, InMatrix outputs, InMatrix output_grads,
              const std::vector<Matrix>& weight_grads, const std::vector<InOut<float>>& bias_grads,
              std::optional<Matrix> input_grads, const PyRepeats* repeats, size_t begin, std::optional<InMatrix> first_weights) {
  const size_t rows = inputs.shape(0);
  const auto& shapes = mlp.shapes();
  check_shape(inputs, rows, mlp.in(), "inputs");
  check_shape(outputs, rows, mlp.out(), "outputs");
  check_shape(output_grads, rows, mlp.out(), "output_grads");
  check(hidden.size() == mlp.hidden_size(rows), "hidden needs hidden_size(rows) floats");
  check(weight_grads.size() == shapes.size() && bias_grads.size() == shapes.size(), "gradients must be as many as layers");
  dense::Gradients grads;
  for (size_t i = 0; i < shapes.size(); ++i) {
    check_shape(weight_grads[i], shapes[i].out, shapes[i].in, "weight_grads");
    check(bias_grads[i].size() == shapes[i].out, "a bias gradient needs one value for each output of its layer");
    grads.weights.push_back(weight_grads[i].data());
    grads.biases.push_back(bias_grads[i].data());
  }
  if (input_grads) {
    check_shape(*input_grads, rows, mlp.in(), "input_grads");
    grads.inputs = input_grads->data();
  }
  const auto repeated = repeats_of(repeats, begin, rows, mlp.in());
  check(first_weights || !(repeated || input_grads), "repeats and input_grads need the weights of the first layer");
  if (first_weights) check_shape(*first_weights, shapes[0].out, shapes[0].in, "first_weights");
  nb::gil_scoped_release release;
  mlp.backward({rows, inputs.data(), hidden.data(), outputs.data(), repeated ? &*repeated : nullptr,
                first_weights ? first_weights->data() : nullptr},
               output_grads.data(), grads);
}

// The norm of all values. 32 partial sums, so that the compiler may use vectors without reordering what is written.
double norm(nb::ndarray<const float, nb::ndim<2>, nb::device::cpu> values) {
  constexpr size_t SUMS = 32;
  const size_t columns = values.shape(1), whole = columns / SUMS * SUMS;
  check(columns < 2 || values.stride(1) == 1, "the values of a row must be next to each other");
  nb::gil_scoped_release release;
  double total = 0;
  for (size_t row = 0; row < values.shape(0); ++row) {
    const float* from = values.data() + static_cast<ptrdiff_t>(row) * values.stride(0);
    float sums[SUMS] = {}, rest = 0;
    for (size_t i = 0; i < whole; i += SUMS)
      for (size_t j = 0; j < SUMS; ++j) sums[j] += from[i + j] * from[i + j];
    for (size_t i = whole; i < columns; ++i) rest += from[i] * from[i];
    for (const float sum : sums) rest += sum;
    total += rest;
  }
  return std::sqrt(total);
}

// Of this thread, so that other programs on its core are not counted.
double cpu_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// GFLOP/s of forward, input_grad and weight_grad, each the best of many calls in these seconds.
std::vector<double> measure_kernels(const std::string& target, size_t rows, size_t in, size_t out, double seconds) {
  const dense::Kernels& kernels = dense::kernels(target);
  nb::gil_scoped_release release;
  const size_t x_stride = dense::padded_stride(in), y_stride = dense::padded_stride(out);
  std::vector<float> x(rows * x_stride, 0.5f), y(rows * y_stride, 0.5f), x_grads(x), w(in * out, 0.01f), b(out, 0.1f);
  std::vector<float> packed(kernels.packed_size(in, out)), packed_back(kernels.packed_size(out, in));
  kernels.pack(w.data(), 1, in, in, out, packed.data());
  kernels.pack(w.data(), in, 1, out, in, packed_back.data());
  auto best_rate = [&](auto run) {
    double best = 1e30;
    const double start = cpu_seconds();
    double end = start;
    do {
      const double begin = end;
      run();
      end = cpu_seconds();
      best = std::min(best, end - begin);
    } while (end - start < seconds);
    return 2e-9 * static_cast<double>(rows * in * out) / best;
  };
  return {best_rate([&] { kernels.forward(rows, in, out, x.data(), x_stride, packed.data(), b.data(), true, y.data(), y_stride); }),
          best_rate([&] {
            kernels.input_grad(rows, out, in, y.data(), y_stride, packed_back.data(), x.data(), x_stride, x_grads.data(), x_stride);
          }),
          best_rate([&] { kernels.weight_grad(rows, in, out, y.data(), y_stride, x.data(), x_stride, false, w.data(), in); })};
}

std::vector<std::string> runnable_targets() {
  std::vector<std::string> names;
  for (const dense::Kernels* kernels : dense::runnable_kernels()) names.push_back(kernels->name);
  return names;
}

}  // namespace

void register_dense(nb::module_& m) {
  nb::class_<PyRepeats>(m, "Repeats").def_prop_ro("features", [](const PyRepeats& repeats) {
    std::vector<size_t> features;
    for (const auto& repeated : repeats.ids.features) features.push_back(repeated.feature);
    return features;
  });
  m.def("norm", &norm);
  m.def("find_repeats", &find_repeats, nb::arg("ids"), nb::arg("width"));
  nb::class_<dense::PackedMlp>(m, "PackedMlp")
      .def("__init__",
           [](dense::PackedMlp* self, const std::vector<size_t>& sizes, const std::vector<bool>& relus, bool trains,
              const std::string& target) { new (self) dense::PackedMlp(make_mlp(sizes, relus, trains, target)); },
           nb::arg("sizes"), nb::arg("relus"), nb::arg("trains"), nb::arg("target") = "")
      .def("pack", &pack, nb::arg("weights"), nb::arg("biases"))
      .def("pack_layer", &pack_layer, nb::arg("layer"), nb::arg("weights"), nb::arg("bias"))
      .def("hidden_size", &dense::PackedMlp::hidden_size, nb::arg("rows"))
      .def("forward", &forward, nb::arg("inputs"), nb::arg("outputs"), nb::arg("hidden") = nb::none(),
           nb::arg("repeats") = nb::none(), nb::arg("begin") = 0)
      .def("backward", &backward, nb::arg("inputs"), nb::arg("hidden"), nb::arg("outputs"), nb::arg("output_grads"),
           nb::arg("weight_grads"), nb::arg("bias_grads"), nb::arg("input_grads") = nb::none(),
           nb::arg("repeats") = nb::none(), nb::arg("begin") = 0, nb::arg("first_weights") = nb::none());
  m.def("dense_target", [] { return std::string(dense::kernels().name); });
  m.def("dense_targets", &runnable_targets);
  m.def("measure_dense_kernels", &measure_kernels);
}
