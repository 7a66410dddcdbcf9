// Compares binary cross entropy with sparse targets, and its gradients, with a reference in extended precision.
#include "rows.h"

#include "../../csrc/cuda/binary_cross_entropy.cu"

#include <algorithm>

namespace sparse_ce {
namespace {

using real = long double;

struct BinaryCase : Case {
  BinaryOptions binary;
  bool has_gradient, has_affine, has_grad_affine, has_pos_weight, has_nan;
  std::vector<int64_t> ends;  // of the classes of each shard, if they are sharded
  std::string text() const {
    char out[256];
    std::snprintf(out, sizeof(out),
                  " size %g shift %g smoothing %g gammas %g %g clip %g gradient %d affine %d %d pos_weight %d nan %d "
                  "unit %d many %d shards %zu",
                  logit_size, shift, binary.label_smoothing, binary.gamma_positive, binary.gamma_negative, binary.clip,
                  has_gradient, has_affine, has_grad_affine, has_pos_weight, has_nan, unit_stride_grad, many_rows,
                  ends.size());
    return Case::text() + out;
  }
};

BinaryCase draw_binary(bool small) {
  BinaryCase c{};
  static_cast<Case&>(c) = draw(small);
  c.options = {};
  const bool reuses = chance(0.06);  // a cluster processes several rows
  if (reuses) {
    c.vocab = c.num_classes = 17000 + below(40), c.row_stride = c.vocab + below(9);
    c.rows = 3, c.max_blocks = 1;
  }
  c.logit_size = one_of<double>({0.5, 5, 12, 60}), c.shift = chance(0.5) ? one_of<double>({-10, -100, 140, 20}) : 0;
  if (chance(0.3)) c.binary.label_smoothing = uniform(0.01, 0.5);
  if (chance(0.4)) {
    c.binary.gamma_positive = one_of<double>({0, 1, 2, 0.5});
    c.binary.gamma_negative = one_of<double>({0, 1, 2, 4, 1.5});
  }
  if (chance(0.3)) c.binary.clip = uniform(0.01, 0.2);
  c.has_gradient = chance(0.85), c.has_affine = chance(0.4);
  c.has_grad_affine = c.has_gradient && chance(0.4);
  c.has_pos_weight = chance(0.4), c.has_nan = chance(0.1), c.many_rows = !reuses && chance(0.3);
  if (chance(0.25)) {
    for (int64_t s = below(4); s > 0; --s) c.ends.push_back(below(c.vocab + 1));
    c.ends.push_back(c.vocab);
    std::sort(c.ends.begin(), c.ends.end());
  }
  return c;
}

// Holds the inputs of a case that other losses do not have.
struct Inputs {
  const BinaryCase& c;
  Array pos_weight, affine;

  Inputs(const BinaryCase& c, Problem& p) : c(c), pos_weight(c.arithmetic, c.num_classes), affine(c.arithmetic, 2) {
    for (int64_t v = 0; v < c.num_classes; ++v) pos_weight.set(v, chance(0.1) ? 0 : uniform(0, 5));
    affine.set(0, chance(0.2) ? uniform(-1, -0.3) : uniform(0.3, 1.5)), affine.set(1, uniform(-3, 3));
    for (int64_t r = 0; r < c.rows; ++r)
      if (c.has_nan && chance(0.3)) p.logits.set(c.at(r, below(c.num_classes)), std::nan(""));
    for (Array* a : {&pos_weight, &affine, &p.logits}) a->upload();
  }
};

// Computes a row of one shard in extended precision.
struct Exact {
  real loss = 0, loss_bound = 1e-35L, affine[2] = {}, affine_bound[2] = {};
  std::vector<real> grad, bound;
  bool zero;

  Exact(const BinaryCase& c, const Problem& p, const Inputs& in, int64_t r, int64_t first, int64_t end)
      : grad(size_t(c.vocab)), bound(grad), zero(p.ignored(r) || p.grad_of(r) == 0) {
    if (p.ignored(r)) return;
    const real eps = c.arithmetic == DType::kFloat64 ? 2.3e-16L : 1.2e-7L, few = 24 * eps;
    const real ulp = c.dtype == DType::kFloat16 ? 0x1p-11L : c.dtype == DType::kBFloat16 ? 0x1p-8L : eps;
    const BinaryOptions& o = c.binary;
    const real e = o.label_smoothing, g = p.grad_of(r);
    const real scale = c.has_affine ? in.affine.get(0) : 1, shift = c.has_affine ? in.affine.get(1) : 0;
    std::vector<real> target(size_t(c.num_classes)), absolute(target);
    bool valid = !p.outside[size_t(r)];
    for (int64_t i = p.begin[r]; i < p.end[r]; ++i) {
      const int64_t column = int64_t(p.indices.get(i));
      if (p.padding(i) || column == kIgnore) continue;
      valid = valid && 0 <= column && column < c.num_classes;
      if (column < 0 || column >= c.num_classes) continue;
      target[column] += p.value_of(i), absolute[column] += std::fabs(p.value_of(i));
    }
    for (int64_t v = first; v < std::min(end, c.num_classes); ++v) {
      const real x = p.logits.get(c.at(r, v)), z = scale * x + shift, w = p.weight_of(v);
      const real by = c.has_pos_weight ? in.pos_weight.get(v) : 1, t = (1 - e) * target[v] + e / 2;
      const real a = w * (1 - t), b = w * by * t, t_size = (1 - e) * absolute[v] + e / 2;
      const real a_size = w * (1 + t_size), b_size = w * by * t_size;
      const real of_z = c.has_affine && std::isfinite(x) ? 3 * eps * (std::fabs(scale * x) + std::fabs(shift)) : 0;
      const Terms f(o, z, few, of_z);
      const auto times = [](real y, real by) { return y == 0 ? 0 : y * by; };
      loss += times(a, f.at[0]) + times(b, f.at[2]);
      loss_bound += a_size * f.bound[0] + b_size * f.bound[2] + few * (times(a_size, f.at[0]) + times(b_size, f.at[2]));
      const real slope = a * f.at[1] + b * f.at[3];
      const real of_slope =
          a_size * f.bound[1] + b_size * f.bound[3] + few * (a_size * std::fabs(f.at[1]) + b_size * std::fabs(f.at[3]));
      grad[v] = g * scale * slope;
      bound[v] =
          ulp * std::fabs(grad[v]) + std::fabs(g * scale) * of_slope + 6e-8L * (c.dtype == DType::kFloat16) + 1e-35L;
      affine[0] += g * times(slope, x), affine[1] += g * slope;
      affine_bound[0] += std::fabs(g) * times(of_slope + few * std::fabs(slope), std::fabs(x)) + 1e-35L;
      affine_bound[1] += std::fabs(g) * (of_slope + few * std::fabs(slope)) + 1e-35L;
    }
    if (valid) return;
    loss = NAN;
    if (zero) return;
    affine[0] = affine[1] = NAN;
    for (real& of_one : grad) of_one = NAN;
  }

 private:
  // Holds F, F', G and G', and the bounds of their errors. The probabilities have the relative error `few` and that of
  // z, which is `of_z`. A corner is evaluated for each combination of their signs.
  struct Terms {
    real at[4], bound[4];

    Terms(const BinaryOptions& o, real z, real few, real of_z) {
      const real tiny = std::exp(-std::fabs(z)), r = (z < 0 ? tiny : 1) / (1 + tiny),
                 q = (z < 0 ? 1 : tiny) / (1 + tiny);
      const real of_q = std::log1p(tiny) + (z > 0 ? z : 0), of_r = std::log1p(tiny) + (z > 0 ? 0 : -z);
      if (std::isnan(z)) {
        for (int k = 0; k < 4; ++k) at[k] = NAN, bound[k] = INFINITY;
        return;
      }
      evaluate(o, r, q, of_q, of_r, at);
      for (int k = 0; k < 4; ++k) bound[k] = 1e-36L;
      for (int corner = 0; corner < 4; ++corner) {
        const real more = corner % 2 ? 1 : -1, other = corner / 2 ? 1 : -1, by_r = few + q * of_z,
                   by_q = few + r * of_z;
        real near[4];
        evaluate(o, r * (1 + more * by_r), q * (1 + other * by_q), of_q * (1 + other * few) + more * r * of_z,
                 of_r * (1 + more * few) + other * q * of_z, near);
        for (int k = 0; k < 4; ++k)
          if (std::isfinite(at[k])) bound[k] = std::max(bound[k], std::fabs(near[k] - at[k]) + few * std::fabs(at[k]));
      }
    }

    static real times(real a, real b) { return a == 0 || b == 0 ? 0 : a * b; }
    static real power(real gamma, real log) { return std::exp(-times(gamma, log)); }
    static void evaluate(const BinaryOptions& o, real r, real q, real of_q, real of_r, real (&out)[4]) {
      const real by_g = power(o.gamma_positive, of_q);
      out[2] = times(by_g, of_r), out[3] = -by_g * (times(o.gamma_positive * r, of_r) + q);
      const real c = o.gamma_negative;
      if (o.clip == 0) {
        const real by_f = power(c, of_r);
        out[0] = times(by_f, of_q), out[1] = by_f * (times(c * q, of_q) + r);
        return;
      }
      const real shifted = r - o.clip, left = q + o.clip;
      out[0] = out[1] = 0;
      if (shifted <= 0) return;
      const real by_f = std::pow(shifted, c), l = -std::log(left);
      out[0] = by_f * l, out[1] = r * q * by_f * (c * l / shifted + 1 / left);
    }
  };
};

// Holds what a call writes for one shard, and where its gradient is.
struct Call {
  const BinaryCase& c;
  Array loss, affine, grad;
  int64_t grad_row_stride;

  Call(const BinaryCase& c, bool in_place)
      : c(c), loss(c.arithmetic, c.rows), affine(c.arithmetic, 2 * c.rows),
        grad(c.dtype, in_place ? 0 : c.rows * (c.vocab + 3), in_place ? 0 : below(9)),
        grad_row_stride(in_place ? c.row_stride : c.vocab + 3) {
    for (Array* a : {&loss, &affine, &grad}) {
      for (int64_t i = 0; i < a->count(); ++i) a->set(i, filler());
      a->upload();
    }
  }

  // Returns the number that fills the gradient before the call.
  double filler() const { return c.dtype == DType::kBFloat16 ? 776 : 777; }

  // Runs the kernel for the classes [first, end) of memory.
  void run(const Problem& p, const Inputs& in, int64_t first, int64_t end, bool gradient, void* grad_logits) {
    BinaryArgs args{};
    p.fill(args);
    args.vocab = end, args.first_class = first;
    args.logits = advance(args.logits, c.dtype, first);
    args.binary = c.binary;
    if (c.has_pos_weight) args.pos_weight = in.pos_weight.device();
    if (c.has_affine) args.affine = in.affine.device();
    args.loss = loss.device();
    if (gradient) {
      args.grad_loss = p.grad_loss.device(), args.grad_loss_stride = c.unit_stride_grad ? 1 : 0;
      args.grad_logits = const_cast<void*>(advance(grad_logits, c.dtype, first));
      args.grad_row_stride = grad_row_stride;
      if (c.has_grad_affine) args.grad_affine = affine.device();
    }
    must(cuda::binary_cross_entropy(args, nullptr), "binary_cross_entropy");
    for (Array* a : {&loss, &affine, &grad}) a->download();
  }
};

double bound_of(real bound) { return std::isnan(bound) ? INFINITY : double(bound); }

void check_row(const Problem& p, const Inputs& in, const Call& call, int64_t r, int64_t first, int64_t end) {
  const BinaryCase& c = call.c;
  const Exact exact(c, p, in, r, first, end);
  if (p.ignored(r))
    compare_bits("loss of an ignored row", r, 0, call.loss.get(r), 0);
  else
    compare("loss", r, 0, call.loss.get(r), double(exact.loss), bound_of(exact.loss_bound));
  if (!c.has_gradient) return;
  for (int k = 0; k < 2 && c.has_grad_affine; ++k) {
    if (exact.zero)
      compare_bits("zero of scale and shift", r, k, call.affine.get(2 * r + k), 0);
    else
      compare("gradient of scale and shift", r, k, call.affine.get(2 * r + k), double(exact.affine[k]),
              bound_of(exact.affine_bound[k]));
  }
  for (int64_t v = first; v < end; ++v) {
    const double ours = call.grad.get(r * call.grad_row_stride + v);
    if (exact.zero || v >= c.num_classes)
      compare_bits("zero of the gradient", r, v, ours, 0);
    else
      compare("gradient", r, v, ours, double(exact.grad[v]), bound_of(exact.bound[v]));
  }
  for (int64_t v = c.vocab; end == c.vocab && v < call.grad_row_stride; ++v)
    compare_bits("memory between rows", r, v, call.grad.get(r * call.grad_row_stride + v), call.filler());
}

void run_case(const BinaryCase& c) {
  Problem p(c);
  for (int64_t r = 0; c.layout == Case::kRanges && r < c.rows; ++r)
    if (chance(0.05)) p.lead_outside(r);
  const Inputs in(c, p);
  std::vector<int64_t> ends = c.ends.empty() ? std::vector<int64_t>{c.vocab} : c.ends;
  Call call(c, false), other(c, c.in_place);
  int64_t first = 0;
  for (const int64_t end : ends) {
    call.run(p, in, first, end, c.has_gradient, call.grad.device());
    for (int64_t r = 0; r < c.rows; ++r) check_row(p, in, call, r, first, end);
    // A call without a gradient, and one that overwrites the logits or writes to other addresses, give the same bits.
    Call forward(c, true);
    forward.run(p, in, first, end, false, nullptr);
    for (int64_t r = 0; r < c.rows; ++r)
      compare_bits("loss without a gradient", r, 0, forward.loss.get(r), call.loss.get(r));
    if (c.has_gradient) {
      other.run(p, in, first, end, true, c.in_place ? p.logits.device() : other.grad.device());
      for (int64_t r = 0; r < c.rows; ++r) {
        compare_bits("loss once more", r, 0, other.loss.get(r), call.loss.get(r));
        for (int k = 0; k < 2; ++k)
          compare_bits("scale and shift once more", r, k, other.affine.get(2 * r + k), call.affine.get(2 * r + k));
      }
    }
    first = end;
  }
  if (!c.has_gradient) return;
  Array logits(c.dtype, c.in_place ? p.logits.count() : 0);
  for (int64_t i = 0; i < logits.count(); ++i) logits.set(i, p.logits.get(i));
  if (c.in_place) p.logits.download();
  const Array& gradient = c.in_place ? p.logits : other.grad;
  for (int64_t r = 0; r < c.rows; ++r) {
    for (int64_t v = 0; v < c.vocab; ++v)
      compare_bits("gradient once more", r, v, gradient.get(r * other.grad_row_stride + v),
                   call.grad.get(r * call.grad_row_stride + v));
    for (int64_t v = c.vocab; c.in_place && r + 1 < c.rows && v < c.row_stride; ++v)
      compare_bits("logits between rows", r, v, gradient.get(r * c.row_stride + v), logits.get(r * c.row_stride + v));
  }
}

Kinds kind_of(const BinaryCase& c) {
  if (c.rows == 0) return {"nothing"};
  static const char* const names[] = {"plain", "focal", "clipped"};
  Kinds kinds = {names[int(binary_kind(c.binary))]};
  if (!c.ends.empty()) {
    kinds.push_back("shards");
  } else {
    BinaryArgs shape{};
    shape.dtype = c.dtype, shape.rows = c.rows, shape.vocab = c.vocab, shape.target.num_classes = c.num_classes;
    shape.planned_rows = c.many_rows ? int64_t(1) << 30 : 0;
    const int64_t classes = shape.classes();
    const int blocks = cuda::blocks_of_row(shape);
    kinds.push_back(blocks == 0 ? "a warp" : blocks == 1 ? "a block" : std::to_string(blocks) + " blocks");
    if (blocks < 2 && classes > (blocks == 0 ? 4096 : 32768)) kinds.push_back(kinds.back() + ", windows");
  }
  if (c.width > 256) kinds.push_back("many entries");
  if (c.in_place && c.has_gradient) kinds.push_back("in place");
  if (c.has_grad_affine) kinds.push_back("scale and shift");
  if (c.binary.label_smoothing == 0 && !c.has_weight) kinds.push_back("alike");
  return kinds;
}

}  // namespace
}  // namespace sparse_ce

int main(int argc, char** argv) {
  using namespace sparse_ce;
  return run_seeds(argc, argv, draw_binary, kind_of, run_case);
}
