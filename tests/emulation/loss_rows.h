// loss_rows.h - Draws rows with weights and scales, and computes their losses in float64.
#pragma once

#include "rows.h"

#include <string>

namespace sparse_ce {
namespace {

struct LossCase : Case {
  bool row_weight, row_scale;
  bool reverses;  // about a third of the row scales reverse the order of the logits
  int64_t weight_step, scale_step;  // of the rows; 0 means one for all rows
  std::vector<int64_t> ends;  // end of the classes of each part, if backward runs in parts
  std::string text() const {
    std::string text = Case::text() + " row_weight " + (row_weight ? std::to_string(weight_step) : "none") +
                       " row_scale " + (row_scale ? std::to_string(scale_step) : "none") + " parts";
    for (const int64_t end : ends) text += " " + std::to_string(end);
    return text;
  }
};

// Holds the factors of the rows' losses and logits. Those of an ignored row must not matter.
struct Factors {
  const LossCase& c;
  Array weight, scale;

  Factors(const LossCase& c, const Problem& p)
      : c(c), weight(c.arithmetic, c.rows * c.weight_step + 1), scale(c.arithmetic, c.rows * c.scale_step + 1) {
    for (Array* a : {&weight, &scale})
      for (int64_t i = 0; i < a->count(); ++i) a->set(i, NAN);
    for (int64_t r = 0; r < c.rows; ++r) {
      if (c.weight_step == 0 || !p.ignored(r)) weight.set(r * c.weight_step, chance(0.2) ? 0 : uniform(-0.5, 2));
      if (c.scale_step == 0 || !p.ignored(r))
        scale.set(r * c.scale_step, chance(0.2) ? 1 : factor(c.reverses ? 0.5 : 0.1));
    }
    weight.upload(), scale.upload();
  }
  // Returns a factor that reverses the order of the logits, or is 0, with the given probability.
  static double factor(double other = 0.1) { return chance(other) ? one_of<double>({-0.7, -1, 0}) : uniform(0.4, 1.3); }
  double weight_of(int64_t r) const { return c.row_weight ? weight.get(r * c.weight_step) : 1; }
  double scale_of(int64_t r) const { return c.row_scale ? scale.get(r * c.scale_step) : 1; }
};

// Computes a row in float64 from the definition, and the rounding bounds of the arithmetic dtype.
struct Exact {
  double loss = 0, lse = 0, loss_bound = 0, lse_bound = 0;
  std::vector<double> grad, grad_bound, grad_values, grad_values_bound;  // grad_values by entry of the row

  Exact(const Problem& p, const Factors& by_row, int64_t r) : grad(size_t(p.c.vocab)), grad_bound(size_t(p.c.vocab)) {
    const Case& c = p.c;
    grad_values.resize(size_t(p.end[r] - p.begin[r]));
    grad_values_bound.resize(grad_values.size());
    if (p.ignored(r)) return;
    const double eps = c.arithmetic == DType::kFloat64 ? 2.3e-16 : 1.2e-7, few = 24 * eps;
    const int64_t n = c.num_classes;
    std::vector<double> z(static_cast<size_t>(n)), slope(static_cast<size_t>(n)), target(static_cast<size_t>(n));
    const double scale = c.options.logit_scale * by_row.scale_of(r), g = p.grad_of(r) * by_row.weight_of(r);
    double max = -INFINITY, size = 0;
    for (int64_t v = 0; v < n; ++v) {
      const double x = scale * p.logits.get(c.at(r, v));
      const double t = c.options.softcap ? std::tanh(x / c.options.softcap) : 0;
      z[v] = c.options.softcap ? c.options.softcap * t : x;
      slope[v] = scale * (1 - t * t);
      max = std::fmax(max, z[v]);
      if (std::isfinite(z[v])) size = std::fmax(size, std::fabs(z[v]));
    }
    for (double x : z)
      if (std::isnan(x)) max = x;
    // The sum without the first of the largest logits, and the bound of its rounding errors: each difference from the
    // largest may be rounded several times. Numbers below the range are 0.
    const double ulp_of_half = c.arithmetic == DType::kFloat64 ? 0x1p-53 : 0x1p-24;
    const auto most = std::find(z.begin(), z.end(), max) - z.begin();
    long double rest = max == -INFINITY ? -1 : max == INFINITY ? NAN : 0, rest_bound = 0;
    for (int64_t v = 0; v < n; ++v) {
      const long double below = (long double)z[v] - max, power = v == most ? 0 : std::exp(below);
      rest += power;
      if (power == 0) continue;
      const double of_scale = scale != 1 ? std::fabs(z[v]) + std::fabs(max) : 0;
      rest_bound += power * (3 * std::fabs(below) + 2 * of_scale + 16) * ulp_of_half +
                    (c.arithmetic == DType::kFloat64 ? 1e-307L : 2e-38L);
    }
    const long double log_rest = std::log1p(rest), log_bound = rest_bound / (1 + rest) + 8 * ulp_of_half * log_rest;
    const auto surprise = [&](int64_t v) { return ((long double)max - z[v]) + log_rest; };
    // The bounds are relative if the transform has no error of its own.
    const bool relative = c.options.softcap == 0 && std::isfinite(max) && std::isfinite(double(rest));
    const long double exact_lse = max == -INFINITY ? max : max + log_rest;
    lse = double(exact_lse);  // if all logits are -inf, lse is -inf and the rest NaN
    lse_bound = few * (size + std::fabs(lse) + 1);

    const double e = c.options.label_smoothing;
    // A scaled or capped logit is rounded; exp turns its absolute error into a relative one.
    const double rounded_z = scale != 1 || c.options.softcap != 0 ? size : 0;
    // The product underflows to 0 in the arithmetic dtype, so that a logit of -inf does not matter.
    const auto product = [&](double a, double b) {
      return c.arithmetic == DType::kFloat32 && float(a) * float(b) == 0 ? 0 : a * b;
    };
    double mass = p.outside[size_t(r)] ? NAN : 0, absolute = 0;
    double of_entries = 0, others = 0, absolute_others = 0;  // others: the weights of all classes but the largest
    const auto bound_of = [&](int64_t v) {  // of its surprise
      return double(8 * ulp_of_half * surprise(v) + log_bound) +
             (scale != 1 ? 2 * ulp_of_half * (std::fabs(z[v]) + std::fabs(max)) * (v != most) : 0);
    };
    for (int64_t i = p.begin[r]; i < p.end[r]; ++i) {
      const int64_t column = int64_t(p.indices.get(i));
      const double value = p.value_of(i);
      if (p.padding(i) || column == kIgnore) continue;
      if (column < 0 || column >= n) {
        mass = NAN;
        continue;
      }
      const double w = product(value, p.weight_of(column));
      if (value == 0) continue;
      if (g * (1 - e) * p.weight_of(column) != 0) {
        const double by = product(g * (1 - e), product(p.weight_of(column), c.logprobs ? value : 1));
        const double of_value = by == 0 ? 0 : by * double(surprise(column));
        grad_values[i - p.begin[r]] = of_value;
        grad_values_bound[i - p.begin[r]] = few * (std::fabs(of_value) + 3 * size + 1);
        if (relative)
          grad_values_bound[i - p.begin[r]] = std::fabs(by) * bound_of(column) + few * std::fabs(of_value) + 1e-37;
      }
      mass += w, absolute += std::fabs(w);
      target[column] += w;
      if (column != most) others += w, absolute_others += std::fabs(w);
      if (w == 0) continue;
      loss += (1 - e) * w * double(surprise(column));
      of_entries += (1 - e) * std::fabs(w) * (bound_of(column) + 8 * ulp_of_half * double(surprise(column)));
    }
    loss_bound = few * (absolute * (2 * size + std::fabs(lse) + 1) + c.options.z_loss * (lse * lse + 1) + 1e-3);
    long double total = 0, smooth = 0;
    for (int64_t v = 0; v < n; ++v) {
      total += p.weight_of(v);
      if (e != 0 && p.weight_of(v) != 0) smooth += p.weight_of(v) * double(surprise(v));
    }
    const double total_weight = double(total);
    loss += e / double(n) * double(smooth) + c.options.z_loss * lse * lse;
    if (e != 0) loss_bound += few * (total_weight / double(n) * (2 * size + std::fabs(lse) + 1)) * 8;
    if (relative && e == 0 && c.options.z_loss == 0) loss_bound = of_entries + 1e-37;
    if (std::isnan(mass) || max == -INFINITY) loss = NAN;

    const double g_lse = c.has_grad_lse ? p.grad_lse.get(r) : 0;
    if (g == 0 && g_lse == 0) return;
    const double a = g * ((1 - e) * mass + e / double(n) * total_weight + 2 * c.options.z_loss * lse) + g_lse;
    const double a_size =
        std::fabs(g) * ((1 - e) * absolute + e / double(n) * total_weight + 2 * c.options.z_loss * std::fabs(lse)) +
        std::fabs(g_lse);
    const double ulp = c.dtype == DType::kFloat16 ? 0x1p-11 : c.dtype == DType::kBFloat16 ? 0x1p-8 : eps;
    for (int64_t v = 0; v < n; ++v) {
      const double q = double(std::exp(z[v] - exact_lse)), o = p.weight_of(v);
      grad[v] = (a * q - g * e / double(n) * o - g * (1 - e) * target[v]) * slope[v];
      const double parts = (q > 0 ? a_size * q * (1 + std::fabs(z[v] - lse) + rounded_z) : 0) +
                           std::fabs(g) * (e / double(n) * o + absolute * (target[v] != 0));
      grad_bound[v] = ulp * std::fabs(grad[v]) + few * parts * (std::fabs(slope[v]) + 1) +
                      6e-8 * (c.dtype == DType::kFloat16) + 1e-37 +
                      (c.arithmetic == DType::kFloat32) * 2e-38 * a_size * (std::fabs(slope[v]) + 1);
      if (!relative || v != most || !(rest < 0.6L)) continue;
      // Nearly all of a belongs to this class, so that the gradient is computed without a difference.
      const double per_class = g * e / double(n), of_row = g * 2 * c.options.z_loss * lse + g_lse;
      grad[v] = double(a * (-rest / (1 + rest)) + g * (1 - e) * others + (per_class * total_weight + of_row) -
                       per_class * o) *
                slope[v];
      if (std::isnan(mass)) grad[v] = NAN;
      const double share = double(rest / (1 + rest));
      const double of_sizes = std::fabs(per_class) * (total_weight + o) + std::fabs(g * 2 * c.options.z_loss * lse) +
                              std::fabs(g_lse) + std::fabs(g) * absolute_others;
      grad_bound[v] = ulp * std::fabs(grad[v]) + 6e-8 * (c.dtype == DType::kFloat16) + 1e-37 +
                      std::fabs(slope[v]) *
                          (a_size * (double(rest_bound) + 16 * ulp_of_half * share) + 16 * ulp_of_half * of_sizes);
    }
  }
};

}  // namespace
}  // namespace sparse_ce
