// kernels.cpp - Exposes functions to tests that no op exposes: the monoids of math.h and the loops over a tile of
// logits.
//
// Built by tests/support/native_modules.py together with csrc/cpu/simd/tile.cpp. Tensors are passed as addresses and
// statistics as tuples, so that two copies of this module, with different instruction sets, share no type.
#include "../../csrc/cpu/simd/tile.h"
#include "../../csrc/ops/loss_mean.h"

#include <pybind11/pybind11.h>

#include <functional>
#include <numeric>
#include <tuple>

namespace py = pybind11;
using namespace sparse_ce;

namespace {

using Four = std::tuple<double, double, double, double>;
using Two = std::tuple<double, double>;

template <typename acc_t>
RowStats<acc_t> row_of(const Four& parts) {
  RowStats<acc_t> row;
  row.max = static_cast<acc_t>(std::get<0>(parts));
  row.rest = static_cast<acc_t>(std::get<1>(parts) - 1);
  row.weighted = static_cast<acc_t>(std::get<2>(parts));
  row.weight = static_cast<acc_t>(std::get<3>(parts));
  return row;
}

template <typename acc_t>
Four parts_of(const RowStats<acc_t>& row) {
  return {row.max, row.total(), row.weighted, row.weight};
}

template <typename acc_t>
Four merge_rows(const Four& a, const Four& b) {
  RowStats<acc_t> row = row_of<acc_t>(a);
  row.merge(row_of<acc_t>(b));
  return parts_of(row);
}

// These convert TargetStats, LossMeanStats and MaskedSum, which have two numbers each, in the order of their fields.
template <typename stats_t>
Two merge_two(const Two& a, const Two& b) {
  stats_t one, other;
  auto& [x, y] = one;
  auto& [z, w] = other;
  using acc_t = std::decay_t<decltype(x)>;
  x = static_cast<acc_t>(std::get<0>(a)), y = static_cast<acc_t>(std::get<1>(a));
  z = static_cast<acc_t>(std::get<0>(b)), w = static_cast<acc_t>(std::get<1>(b));
  one.merge(other);
  return {x, y};
}

LossOptions options_of(double scale, double softcap, double smoothing, double z_loss) {
  LossOptions options;
  options.logit_scale = scale;
  options.softcap = softcap;
  options.label_smoothing = smoothing;
  options.z_loss = z_loss;
  return options;
}

template <typename scalar_t>
Four tile_stats(uintptr_t logits, int64_t n, double scale, double softcap, bool weighted, uintptr_t class_weight) {
  using acc_t = acc_type<scalar_t>;
  const auto* x = reinterpret_cast<const scalar_t*>(logits);
  return parts_of(cpu::Tile<scalar_t>::stats(x, n, LogitTransform<acc_t>(options_of(scale, softcap, 0, 0)), weighted,
                                             reinterpret_cast<const acc_t*>(class_weight), x));
}

template <typename acc_t>
GradientCoefficients<acc_t> coefficients(const LossOptions& options, double grad, double mass, double lse, int64_t n) {
  return {static_cast<acc_t>(grad),
          acc_t(0),
          static_cast<acc_t>(mass),
          static_cast<acc_t>(lse),
          acc_t(0),
          static_cast<acc_t>(n),
          options,
          n};
}

template <typename scalar_t>
void tile_gradient(uintptr_t logits, int64_t n, double scale, double softcap, double smoothing, double grad,
                   double mass, double lse, uintptr_t class_weight, uintptr_t gradient, bool nontemporal) {
  using acc_t = acc_type<scalar_t>;
  const LossOptions options = options_of(scale, softcap, smoothing, 0);
  const auto* x = reinterpret_cast<const scalar_t*>(logits);
  cpu::Tile<scalar_t>::gradient(
      x, n, LogitTransform<acc_t>(options), smoothing != 0, coefficients<acc_t>(options, grad, mass, lse, n),
      reinterpret_cast<const acc_t*>(class_weight), x, {reinterpret_cast<scalar_t*>(gradient), nontemporal});
}

template <typename scalar_t>
void tile_entries(uintptr_t logits, int64_t n, double scale, double softcap, double smoothing, double grad, double mass,
                  double lse, uintptr_t class_weight, uintptr_t target_weight) {
  using acc_t = acc_type<scalar_t>;
  const LossOptions options = options_of(scale, softcap, smoothing, 0);
  const auto* of_target = reinterpret_cast<const acc_t*>(target_weight);
  cpu::Tile<scalar_t>::entries(reinterpret_cast<acc_t*>(logits), n, LogitTransform<acc_t>(options),
                               coefficients<acc_t>(options, grad, mass, lse, n),
                               reinterpret_cast<const acc_t*>(class_weight), of_target,
                               std::accumulate(of_target, of_target + n, mass, std::minus<double>()));
}

template <typename scalar_t>
void define_tile(py::module_& m, const std::string& dtype) {
  m.def(("tile_stats_" + dtype).c_str(), tile_stats<scalar_t>);
  m.def(("tile_gradient_" + dtype).c_str(), tile_gradient<scalar_t>);
  m.def(("tile_entries_" + dtype).c_str(), tile_entries<scalar_t>);
}

template <typename acc_t>
void define_monoids(py::module_& m, const std::string& dtype) {
  m.def(("row_identity_" + dtype).c_str(), [] { return parts_of(RowStats<acc_t>()); });
  m.def(("merge_rows_" + dtype).c_str(), merge_rows<acc_t>);
  m.def(("merge_targets_" + dtype).c_str(), merge_two<TargetStats<acc_t>>);
  m.def(("merge_means_" + dtype).c_str(), merge_two<LossMeanStats<acc_t>>);
  m.def(("merge_masked_sums_" + dtype).c_str(), merge_two<MaskedSum<acc_t>>);
}

}  // namespace

PYBIND11_MODULE(kernels, m) {
  m.def("instruction_set", [] {
    switch (cpu::instruction_set_in_use()) {
      case cpu::InstructionSet::kAvx512:
        return "avx512";
      case cpu::InstructionSet::kAvx2:
        return "avx2";
      default:
        return "default";
    }
  });
  m.attr("span") = cpu::kSpan;
  m.def("use_nontemporal", [](uintptr_t logits, uintptr_t gradient, int64_t n, int64_t size) {
    const auto at = [](uintptr_t address) { return reinterpret_cast<const void*>(address); };
    return cpu::use_nontemporal(at(logits), at(gradient), n, size);
  });
  define_monoids<float>(m, "float32");
  define_monoids<double>(m, "float64");
  define_tile<float>(m, "float32");
  define_tile<double>(m, "float64");
  define_tile<Half>(m, "float16");
  define_tile<BFloat16>(m, "bfloat16");
}
