// plain.cpp - Exposes the plain loops of csrc/core/plain.h to Python.
#include "../../csrc/core/plain.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>

namespace plain = sparse_ce::plain;

PYBIND11_MODULE(plain, m) {
  m.def("cross_entropy",
        [](const std::vector<double>& x, const std::vector<int>& classes, const std::vector<double>& weights,
           const std::vector<double>& class_weights, double label_smoothing, double z_loss, double scale, double cap) {
          const plain::Row row =
              plain::cross_entropy(x, classes, weights, class_weights, {label_smoothing, z_loss, scale, cap});
          return std::make_tuple(row.loss, row.lse, row.grad);
        });
}
