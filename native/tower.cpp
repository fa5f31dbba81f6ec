// A tower of a retrieval model: linear layers with ReLU between them, and the last one's outputs made unit vectors.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>

#include "arrays.hpp"
#include "dense/kernels.hpp"

namespace {

using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutMatrix = nb::ndarray<nb::numpy, float, nb::ndim<2>>;
constexpr float LEAST_NORM = 1e-12f;  // as torch's normalize has it
constexpr size_t FEW = 64 << 10;      // products, which are made before another thread would have the GIL

class Tower {
 public:
  explicit Tower(const std::vector<std::pair<Matrix, In<float>>>& given) {
    for (const auto& [weights, bias] : given) {
      Layer layer{weights.shape(1), weights.shape(0), {}, {bias.data(), bias.data() + bias.size()}};
      if (bias.size() != layer.out || !layer.in || (!layers_.empty() && layers_.back().out != layer.in))
        throw std::invalid_argument("a layer does not fit its bias or the one before it");
      layer.packed.resize(kernels_.packed_size(layer.in, layer.out));
      kernels_.pack(weights.data(), 1, layer.in, layer.in, layer.out, layer.packed.data());
      layers_.push_back(std::move(layer));
    }
    if (layers_.empty()) throw std::invalid_argument("a tower has a layer");
  }

  // Unit vectors [rows][out of the last layer].
  OutMatrix vectors(const Matrix& inputs) const {
    if (inputs.shape(1) != layers_.front().in) throw std::invalid_argument("a tower needs the inputs of its first layer");
    const size_t rows = inputs.shape(0), out = layers_.back().out;
    auto found = std::make_unique<float[]>(rows * out);
    {
      const ReleaseGil release(rows * layers_.front().in * layers_.front().out > FEW);
      run(inputs.data(), rows, found.get());
    }
    float* data = found.get();
    nb::capsule owner(found.release(), [](void* p) noexcept { delete[] static_cast<float*>(p); });
    return OutMatrix(data, {rows, out}, owner);
  }

 private:
  struct Layer {
    size_t in, out;
    std::vector<float> packed, bias;
  };

  void run(const float* x, size_t rows, float* to) const {
    std::vector<float> values, next;
    for (const Layer& layer : layers_) {
      const bool is_last = &layer == &layers_.back();
      if (!is_last) next.resize(rows * layer.out);
      float* y = is_last ? to : next.data();
      kernels_.forward(rows, layer.in, layer.out, x, layer.in, layer.packed.data(), layer.bias.data(), !is_last, y, layer.out);
      values.swap(next), x = values.data();
    }
    for (size_t row = 0; row < rows; ++row) normalise(to + row * layers_.back().out, layers_.back().out);
  }

  static void normalise(float* vector, size_t size) {
    float sum = 0;
    for (size_t i = 0; i < size; ++i) sum += vector[i] * vector[i];
    const float norm = std::max(std::sqrt(sum), LEAST_NORM);
    for (size_t i = 0; i < size; ++i) vector[i] /= norm;
  }

  const dense::Kernels& kernels_ = dense::kernels();
  std::vector<Layer> layers_;
};

}  // namespace

void register_tower(nb::module_& m) {
  nb::class_<Tower>(m, "Tower")
      .def(nb::init<const std::vector<std::pair<Matrix, In<float>>>&>(), nb::arg("layers"))
      .def("vectors", &Tower::vectors, nb::arg("inputs"));
}
