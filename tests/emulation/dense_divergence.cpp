// Compares divergences of a student from a dense teacher, and their gradients, with a reference in extended precision.
#include "harness.h"

#include "../../csrc/cuda/dense_divergence.cu"

#include <algorithm>

namespace sparse_ce {
namespace {

using real = long double;

// Describes the logits of a model, and how they are transformed.
struct Model {
  DType dtype;
  int64_t columns, row_stride, column_stride, offset;
  double scale, softcap;
  bool row_scale;
};

struct Case {
  Divergence kind;
  double beta, size, apart, shift;
  Model student, teacher;
  int64_t rows, classes, max_blocks;
  bool has_mask, has_labels, in_place, infinite;
  bool agrees;  // the logits of both models differ by at most `apart`, and by `shift`
  std::vector<int64_t> ends;  // of the columns of each shard, if classes are sharded
  DType arithmetic() const { return student.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }
  std::string text() const {
    char out[512];
    std::snprintf(
        out, sizeof(out),
        "kind %d beta %g size %g apart %g agrees %d shift %g dtypes %d %d rows %ld columns %ld classes %ld strides %ld "
        "%ld; %ld "
        "%ld offsets %ld %ld scales %g %g softcaps %g %g mask %d labels %d in_place %d infinite %d shards %zu "
        "max_blocks %ld",
        int(kind), beta, size, apart, agrees, shift, int(student.dtype), int(teacher.dtype), long(rows),
        long(student.columns), long(classes), long(student.row_stride), long(student.column_stride),
        long(teacher.row_stride), long(teacher.column_stride), long(student.offset), long(teacher.offset),
        student.scale, teacher.scale, student.softcap, teacher.softcap, has_mask, has_labels, in_place, infinite,
        ends.size(), long(max_blocks));
    return out;
  }
};

Model draw_model(int64_t rows, int64_t columns, DType dtype) {
  Model m{dtype, columns, columns, 1, 0, 1, 0, chance(0.2)};
  if (chance(0.2))
    m.row_stride = 1 + below(2), m.column_stride = m.row_stride * (rows + below(3));
  else if (chance(0.15))
    m.column_stride = 2, m.row_stride = 2 * columns + below(3);
  else if (chance(0.4))
    m.row_stride = columns + (chance(0.5) ? 8 : below(20));
  m.offset = chance(0.5) ? 0 : below(9);
  if (chance(0.4)) m.scale = uniform(0.3, 1.5);
  if (chance(0.2)) m.softcap = uniform(3, 30);
  return m;
}

const std::vector<DType> kDTypes = {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};

Case draw(bool small) {
  Case c{};
  c.kind = static_cast<Divergence>(below(9));
  c.beta = one_of<double>({0.5, 0.1, 0.9, 0.3, 0.75});
  c.size = one_of<double>({0.1, 1, 6, 40}), c.apart = one_of<double>({0.01, 1, 1});
  c.agrees = chance(0.4);
  if (c.agrees) c.apart = one_of<double>({1e-1, 1e-2, 1e-3, 1e-4, 1e-6, 0}), c.shift = one_of<double>({0, 0, 64});
  const DType dtype = one_of(kDTypes), of_teacher = chance(0.7) ? dtype : one_of(kDTypes);
  const bool wide = chance(small ? 0.3 : 0.35);
  int64_t columns = one_of<int64_t>({1, 2, 8, 31, 33, 257, 600, 1000});
  c.rows = below(small ? 8 : 16);
  if (wide) {  // a block, or a cluster of blocks
    columns = one_of<int64_t>({4100, 5003, 12003, 17000, 24001, 35000, small ? 36001 : 71003});
    c.rows = 1 + below(small || columns > 13000 ? 2 : 4);
  }
  c.classes = chance(0.3) ? 1 + below(columns) : columns;
  if (wide) c.classes = columns - (chance(0.3) ? below(50) : 0);
  c.student = draw_model(c.rows, columns, dtype);
  c.teacher = draw_model(c.rows, c.classes + (chance(0.3) ? below(20) : columns - c.classes), of_teacher);
  if (chance(0.5)) c.teacher.offset = c.student.offset, c.teacher.row_stride = c.student.row_stride;
  if (chance(0.5)) c.teacher.column_stride = c.student.column_stride = 1;
  if (c.agrees) {
    c.teacher.scale = c.student.scale, c.teacher.softcap = c.student.softcap;
    c.teacher.row_scale = c.student.row_scale;
  }
  const auto room = [&](Model& m) {  // for rows of column stride 1
    if (m.column_stride == 1) m.row_stride = std::max(m.row_stride, m.columns);
  };
  room(c.student), room(c.teacher);
  if (chance(0.05)) c.teacher.row_stride = 0;
  c.has_mask = chance(0.4), c.has_labels = chance(0.5), c.infinite = chance(0.25);
  if (c.infinite) c.size = std::min(c.size, 6.0);  // no probability of the student underflows
  c.in_place = c.student.column_stride == 1 && chance(0.5);
  c.max_blocks = chance(0.4) ? 1 + below(3) : 0;
  if (chance(0.25)) {
    for (int64_t s = below(4); s > 0; --s) c.ends.push_back(below(columns + 1));
    c.ends.push_back(columns);
    std::sort(c.ends.begin(), c.ends.end());
  }
  return c;
}

int64_t extent(const Model& m, int64_t rows) {
  return rows ? (rows - 1) * m.row_stride + (m.columns - 1) * m.column_stride + 1 : 0;
}
int64_t place(const Model& m, int64_t r, int64_t column) { return r * m.row_stride + column * m.column_stride; }

struct Problem {
  const Case& c;
  Array student, teacher, student_scale, teacher_scale, mask, labels, grad;

  explicit Problem(const Case& c)
      : c(c), student(c.student.dtype, extent(c.student, c.rows), c.student.offset),
        teacher(c.teacher.dtype, extent(c.teacher, c.rows), c.teacher.offset),
        student_scale(c.arithmetic(), chance(0.5) ? c.rows : 1),
        teacher_scale(c.arithmetic(), c.agrees || chance(0.5) ? student_scale.count() : 1), mask(DType::kUInt8, c.rows),
        labels(chance(0.5) ? DType::kInt64 : DType::kInt32, c.rows),
        grad(c.arithmetic(), (divergence_count(c.kind) + 1) * c.rows) {
    const double nan = std::nan("");
    for (int64_t i = 0; i < student.count(); ++i) student.set(i, nan);
    for (int64_t i = 0; i < teacher.count(); ++i) teacher.set(i, nan);  // columns beyond the classes must not matter
    for (int64_t r = 0; r < c.rows; ++r) {
      mask.set(r, !c.has_mask || !chance(0.35));
      labels.set(r, double(chance(0.3) ? one_of<int64_t>({-1, -100}) : below(c.classes)));
      const bool none = chance(0.15);
      for (int k = 0; k <= divergence_count(c.kind); ++k)
        grad.set(k * c.rows + r, none || chance(0.15) ? 0 : uniform(-2, 2));
      const double shift = !c.infinite && chance(0.1) ? 100 : 0, of_student = !c.infinite && chance(0.05) ? 30 : 1;
      const bool compares = mask.get(r) != 0, reads = compares || (c.has_labels && labels.get(r) >= 0);
      const bool equal = c.agrees && c.apart == 0;
      const int64_t certain = c.agrees && !c.infinite && chance(0.5) ? below(c.classes) : -1;
      const double lead = one_of<double>({5, 20, 60});
      for (int64_t v = 0; v < c.classes; ++v) {
        double x = shift + uniform(-c.size, c.size) * of_student + (v == certain ? lead : 0);
        if (equal) x = std::round(2 * x) / 2;  // the shift is exact in all dtypes
        const double y = x - c.shift + uniform(-1, 1) * (c.agrees ? 1 : c.size) * c.apart;
        const bool both = c.agrees && chance(0.05);  // are -inf
        const auto is_infinite = [&](double p) { return v > 0 && c.infinite && (both || chance(c.agrees ? 1e-4 : p)); };
        if (reads) student.set(place(c.student, r, v), is_infinite(0.01) ? -INFINITY : x);
        if (compares || c.teacher.row_stride == 0)
          teacher.set(place(c.teacher, r, v), is_infinite(0.05) ? -INFINITY : y);
      }
      if (reads && chance(0.04)) student.set(place(c.student, r, below(c.classes)), nan);
      if (compares && chance(0.04)) teacher.set(place(c.teacher, r, below(c.classes)), nan);
    }
    for (Array* a : {&student_scale, &teacher_scale})
      for (int64_t i = 0; i < a->count(); ++i)
        a->set(i, c.agrees && a == &teacher_scale ? student_scale.get(i) : uniform(0.4, 1.4));
    for (Array* a : {&student, &teacher, &student_scale, &teacher_scale, &mask, &labels, &grad}) a->upload();
  }

  bool compares(int64_t r) const { return !c.has_mask || mask.get(r) != 0; }
  int64_t label(int64_t r) const { return c.has_labels ? int64_t(labels.get(r)) : -1; }
  double grad_of(int k, int64_t r) const { return grad.get(k * c.rows + r); }

  DenseLogits view(const Model& m, const Array& logits, const Array& scale) const {
    DenseLogits view{};
    view.data = logits.device(), view.dtype = m.dtype;
    view.row_stride = m.row_stride, view.column_stride = m.column_stride;
    view.options.logit_scale = m.scale, view.options.softcap = m.softcap;
    if (m.row_scale) view.row_scale = scale.device(), view.row_scale_stride = scale.count() == 1 ? 0 : 1;
    return view;
  }
  DenseDivergenceArgs args(DenseStep step) const {
    DenseDivergenceArgs args{};
    args.step = step;
    args.student = view(c.student, student, student_scale), args.teacher = view(c.teacher, teacher, teacher_scale);
    args.rows = c.rows, args.columns = c.student.columns, args.classes = c.classes;
    args.kind = c.kind, args.beta = c.beta;
    if (c.has_mask) args.row_mask = static_cast<const bool*>(mask.device());
    if (c.has_labels) args.labels = labels.device();
    args.labels_dtype = labels.dtype();
    args.grad_sums = grad.device(), args.max_blocks = c.max_blocks;
    return args;
  }
};

// Returns exp(x) - 1 - x.
real exponential_less_2(real x) {
  if (std::fabs(x) >= 0.25L) return std::expm1(x) - x;
  real series = 1;
  for (int i = 24; i > 2; --i) series = 1 + series * x / i;
  return x * x / 2 * series;
}
// Returns x - log(1 + x).
real less_logarithm(real x) {
  if (std::fabs(x) >= 0.25L) return x - std::log1p(x);
  real series = 0;
  for (int i = 40; i > 1; --i) series = 1 / real(i) - x * series;
  return x * x * series;
}

// Computes a row in extended precision. `log_ratio` is that of the kernel; it selects what slopes are relative to.
struct Exact {
  static constexpr int kMost = kMostDivergences;
  struct OfModel {
    std::vector<real> logit, log_prob, slope;
    real max = -INFINITY, lse = 0, sum = 0, size = 0;  // size: the largest finite logit, or lse

    OfModel(const Problem& p, const Model& m, const Array& logits, const Array& scales, int64_t r) {
      const double row_scale = m.row_scale ? scales.get(scales.count() == 1 ? 0 : r) : 1;
      const real scale = real(m.scale) * row_scale;
      for (int64_t v = 0; v < p.c.classes; ++v) {
        const real x = logits.get(place(m, r, v)), t = m.softcap ? std::tanh(scale * x / m.softcap) : 0;
        logit.push_back(m.softcap ? m.softcap * t : scale * x);
        const real cosh = m.softcap ? std::cosh(scale * x / m.softcap) : 1;
        slope.push_back(scale / (cosh * cosh));
        max = logit.back() > max ? logit.back() : max;
        if (std::isfinite(logit.back())) size = std::max(size, std::fabs(logit.back()));
      }
      for (const real z : logit) sum += std::exp(z - max);
      lse = max + std::log(sum);
      size = std::max(size, std::fabs(lse));
      for (const real z : logit) log_prob.push_back(z - lse);
    }
  };

  real term[kMost] = {}, slope[kMost] = {}, term_bound[kMost] = {}, slope_bound[kMost] = {}, loss = 0, loss_bound = 0;
  std::vector<real> grad, bound;
  real lse[2] = {}, max[2] = {}, lse_bound = 0;
  bool zero = true, agrees = false;

  Exact(const Problem& p, int64_t r, real log_ratio) : grad(size_t(p.c.student.columns)), bound(grad) {
    const Case& c = p.c;
    const int64_t label = p.label(r);
    const bool compares = p.compares(r);
    if (!compares && label < 0) return;
    const real eps = c.arithmetic() == DType::kFloat64 ? 2.3e-16L : 1.2e-7L, few = 24 * eps;
    const int count = divergence_count(c.kind);
    const OfModel q(p, c.student, p.student, p.student_scale, r);
    lse[0] = q.lse, max[0] = q.max;
    real size = 4 + q.size;
    std::vector<real> log_p(size_t(c.classes), 0), x(log_p), x_bound(log_p);
    if (compares) {
      const OfModel of_teacher(p, c.teacher, p.teacher, p.teacher_scale, r);
      log_p = of_teacher.log_prob;
      lse[1] = of_teacher.lse, max[1] = of_teacher.max;
      size += of_teacher.size;
      relate(p, q, of_teacher, eps, x, x_bound);
    }
    lse_bound = few * size;
    if (label >= 0) loss = -q.log_prob[size_t(label)], loss_bound = few * size;
    std::vector<Of> of_class[kMost];
    double divergence[kMost] = {};
    const bool near = std::isfinite(log_ratio);
    const real sign = log_ratio < 0 ? 1 : log_ratio > 0 ? -1 : 0;  // of q - p of the largest class
    for (int k = 0; compares && k < count; ++k)
      for (int64_t v = 0; v < c.classes; ++v) {
        of_class[k].emplace_back(c.kind == Divergence::kSeveral ? kSeveral[k] : c.kind, c.beta, log_p[v], q.log_prob[v],
                                 x[v], near, sign);
        Of& of = of_class[k].back();
        of.weigh(eps, few, few * size, x_bound[v]);
        term[k] += of.term, slope[k] += of.slope, divergence[k] = double(2 * term[k]);
      }
    agrees = compares && is_near(c.kind, c.beta, divergence);
    for (int k = 0; compares && k < count; ++k)
      for (Of& of : of_class[k]) {
        if (!near && !agrees) of.term_error = of.far_error, of.slope_error = of.far_error + of.unsure;
        term_bound[k] += of.term_error, slope_bound[k] += of.slope_error;
        // Signs are unknown if the differences may underflow.
        if (c.kind >= Divergence::kTv && term[k] < 1e-36L) slope_bound[k] += of.unsure;
      }
    zero = label < 0 || p.grad_of(count, r) == 0;
    for (int k = 0; compares && k < count; ++k) zero = zero && p.grad_of(k, r) == 0;
    if (zero) return;
    const real ulp = c.student.dtype == DType::kFloat16    ? 0x1p-11L
                     : c.student.dtype == DType::kBFloat16 ? 0x1p-8L
                                                           : eps;
    for (int64_t v = 0; v < c.classes; ++v) {
      const real of_q = std::exp(q.log_prob[v]), g_label = label >= 0 ? p.grad_of(count, r) : 0;
      real dz = g_label * (of_q - (v == label)), parts = few * (std::fabs(g_label) * (of_q * size + (v == label)));
      for (int k = 0; compares && k < count; ++k) {
        const real g = p.grad_of(k, r);
        if (g == 0) continue;
        dz += g * (of_class[k][v].slope - of_q * slope[k]);
        parts +=
            std::fabs(g) * (of_class[k][v].slope_error + of_q * (slope_bound[k] + few * size * std::fabs(slope[k])));
      }
      grad[v] = dz * q.slope[v];
      bound[v] = ulp * std::fabs(grad[v]) + parts * (std::fabs(q.slope[v]) + few) + few * std::fabs(dz * q.slope[v]) +
                 6e-8L * (c.student.dtype == DType::kFloat16) + 1e-35L;
    }
  }

 private:
  static constexpr Divergence kSeveral[kMost] = {Divergence::kForwardKl, Divergence::kReverseKl, Divergence::kJsd,
                                                 Divergence::kTv};

  // Computes x = log(q / p) from differences of logits, and the error that their rounding causes. The bound is 0 if all
  // logits differ by the same number.
  static void relate(const Problem& p, const OfModel& q, const OfModel& of_teacher, real eps, std::vector<real>& x,
                     std::vector<real>& bound) {
    const Case& c = p.c;
    const size_t largest =
        size_t(std::max_element(of_teacher.logit.begin(), of_teacher.logit.end()) - of_teacher.logit.begin());
    const auto difference = [&](size_t v) {
      return q.logit[v] == of_teacher.logit[v] ? real(0) : q.logit[v] - of_teacher.logit[v];
    };
    real above = 0, apart = 0;  // sums of q / q_a * p_a - p, and of p |x|
    for (size_t v = 0; v < x.size(); ++v) {
      x[v] = difference(v) - difference(largest);
      above += std::exp(of_teacher.log_prob[v]) * std::expm1(x[v]);
    }
    const real log_ratio = std::log1p(above);
    const bool rounds = c.student.scale != 1 || c.student.softcap != 0 || c.student.row_scale || c.teacher.scale != 1 ||
                        c.teacher.softcap != 0 || c.teacher.row_scale ||
                        size_of(c.teacher.dtype) > size_of(c.arithmetic());
    for (size_t v = 0; v < x.size(); ++v) {
      const real probability = std::exp(of_teacher.log_prob[v]);
      x[v] = std::isfinite(log_ratio) ? x[v] - log_ratio : q.log_prob[v] - of_teacher.log_prob[v];
      if (probability > 0 && std::isfinite(x[v])) apart += probability * std::fabs(x[v]);
    }
    const bool equal = q.logit == of_teacher.logit;
    for (size_t v = 0; v < x.size(); ++v)
      bound[v] = eps * (4 * (std::fabs(x[v]) + std::fabs(log_ratio) + apart) +
                        (rounds && !equal ? 8 * (q.size + of_teacher.size) : 0));
  }

  // Computes what a class adds to a divergence, and the errors of both numbers. Rows that are not near have
  // `far_error`, and `unsure` is added to that of the slope if rounding may change a sign.
  struct Of {
    real term = 0, slope = 0, weight = 0, unsure = 0, term_error = 0, slope_error = 0, far_error = 0;

    Of(Divergence kind, real b, real log_p, real log_q, real x, bool near, real sign)
        : p(std::exp(log_p)), q(std::exp(log_q)), x(x), logs(finite(log_p) + finite(log_q)), kind(kind) {
      const real rest = 1 - b, above = p > 0 && std::isfinite(x) ? p * std::expm1(x) : q - p;
      const auto times = [](real probability, real y) { return probability == 0 ? 0 : probability * y; };
      const real of_p = kind == Divergence::kSkewReverse ? rest : b, of_q = 1 - of_p, least = std::min(b, rest);
      const real m = of_p * p + of_q * q, log_least = -std::log(least), sum = p + q;
      // log(p / m) + m / p - 1 and log(q / m) + m / q - 1, each times its probability
      const bool ratio = std::fabs(x) < 40;
      const real of_forward =
          ratio ? p * less_logarithm(of_q * std::expm1(x)) : times(p, std::log(p / m)) + of_q * above;
      const real of_reverse =
          ratio ? q * less_logarithm(of_p * std::expm1(-x)) : times(q, std::log(q / m)) - of_p * above;
      const real log_q_less = ratio ? -std::log1p(of_p * std::expm1(-x)) : std::log(q / m);  // log(q / m)
      switch (kind) {
        case Divergence::kForwardKl:
          term = ratio ? p * exponential_less_2(x) : above - times(p, x), slope = near ? above : -p;
          weight = sum + times(p, finite(x));
          break;
        case Divergence::kReverseKl:
          slope = times(q, x), term = ratio ? q * exponential_less_2(-x) : slope - above;
          weight = sum + times(q, finite(x));
          break;
        case Divergence::kJsd:
          slope = rest * times(q, log_q_less), term = b * of_forward + rest * of_reverse;
          weight = sum * (1 + log_least);
          break;
        case Divergence::kSkewForward:
          term = of_forward, slope = rest * rest * times(q, above / m), weight = sum * (1 + log_least) / least;
          break;
        case Divergence::kSkewReverse:
          term = of_reverse, slope = times(q, log_q_less - b * rest * above / m);
          weight = sum * (1 + log_least) / least;
          break;
        case Divergence::kAlpha: {
          const real product = p == 0 || q == 0 ? 0 : std::exp(b * log_p + rest * log_q);
          term =
              ratio ? p * (rest * exponential_less_2(x) - exponential_less_2(rest * x)) : rest * above - (product - p);
          term /= b * rest, slope = (ratio ? -q * std::expm1(-b * x) : q - product) / b, weight = sum / (b * rest);
          break;
        }
        case Divergence::kTv:
          term = std::fabs(above) / 2;
          slope = q * ((above > 0) - (above < 0) - (near ? sign : 0)) / 2, weight = sum;
          if (std::isnan(p) || std::isnan(q)) slope = p + q;
          break;
        case Divergence::kHellinger: {
          const real root = std::sqrt(p) - std::sqrt(q), half = std::expm1(x / 2);
          term = (ratio ? p * half * half : root * root) / 2;
          slope = (ratio ? q * -std::expm1(-x / 2) : q - std::sqrt(p * q)) / 2, weight = sum;
          break;
        }
        case Divergence::kSeveral:
          break;
      }
      amplified = kind == Divergence::kSkewForward || kind == Divergence::kSkewReverse || kind == Divergence::kAlpha
                      ? 1 / least
                      : 1;
    }

    void weigh(real eps, real few, real error, real x_error) {
      const real sum = p + q;
      far_error = error * weight;
      if (kind == Divergence::kTv && std::fabs(p - q) <= error * sum) unsure = q;
      term_error = far_error, slope_error = far_error + unsure;
      if (!(std::fabs(x) < 0.25L)) return;
      const real relative = amplified * (few + eps * logs);
      const real moves = kind == Divergence::kTv ? sum : std::fabs(slope) + sum * x_error;
      term_error = relative * std::fabs(term) + amplified * x_error * moves;
      slope_error = relative * std::fabs(slope) + amplified * x_error * sum;
      if (kind == Divergence::kTv) slope_error += x_error > 0 && std::fabs(x) <= x_error ? q : 0;
    }

   private:
    real p, q, x, logs, amplified;  // logs: the sizes of both log-probabilities
    Divergence kind;

    static real finite(real y) { return std::isfinite(y) ? std::fabs(y) : 0; }
  };
};

struct Results {
  Array stats, sums, grad;
  int64_t grad_row_stride;

  Results(const Case& c, bool in_place)
      : stats(c.arithmetic(), kDenseStats * c.rows), sums(c.arithmetic(), (2 * divergence_count(c.kind) + 2) * c.rows),
        grad(c.student.dtype, in_place ? 0 : c.rows * c.student.columns, in_place ? 0 : below(9)),
        grad_row_stride(in_place ? c.student.row_stride : c.student.columns) {
    for (Array* a : {&stats, &sums, &grad}) {
      for (int64_t i = 0; i < a->count(); ++i) a->set(i, 777);
      a->upload();
    }
  }
  void give(DenseDivergenceArgs& args, void* gradient) {
    args.stats = stats.device(), args.sums = sums.device();
    args.grad = gradient, args.grad_row_stride = grad_row_stride;
  }
};

void run(const DenseDivergenceArgs& args) { must(cuda::dense_divergence(args, nullptr), "dense_divergence"); }

// Restricts the arguments to the classes of shard `s`.
DenseDivergenceArgs of_shard(DenseDivergenceArgs args, const Case& c, size_t s) {
  args.first_class = s == 0 ? 0 : c.ends[s - 1];
  args.columns = c.ends[s] - args.first_class;
  args.classes = std::clamp<int64_t>(c.classes - args.first_class, 0, args.columns);
  for (DenseLogits* x : {&args.student, &args.teacher})
    x->data = advance(x->data, x->dtype, args.first_class * x->column_stride);
  if (args.grad) args.grad = advance(args.grad, args.student.dtype, args.first_class);
  return args;
}

// Computes statistics, sums and gradient of the shards. The host merges numbers of the shards.
void run_shards(const Problem& p, Results& results, void* gradient) {
  const Case& c = p.c;
  const auto args_of = [&](DenseStep step, size_t s) {
    DenseDivergenceArgs args = p.args(step);
    results.give(args, gradient);
    return of_shard(args, c, s);
  };
  std::vector<double> largest(size_t(2 * c.rows), -INFINITY), sum(largest);
  std::vector<std::vector<double>> of_shards;
  for (size_t s = 0; s < c.ends.size(); ++s) {
    run(args_of(DenseStep::kStatistics, s));
    results.stats.download();
    of_shards.emplace_back();
    for (int64_t i = 0; i < kDenseStats * c.rows; ++i) of_shards.back().push_back(results.stats.get(i));
  }
  for (size_t i = 0; i < largest.size(); ++i) {
    const size_t at = i / 2 * size_t(kDenseStats) + i % 2 * 2;
    for (const auto& stats : of_shards) largest[i] = std::max(largest[i], stats[at]);
    sum[i] = 0;
    for (const auto& stats : of_shards) sum[i] += stats[at + 1] * std::exp(stats[at] - largest[i]);
    results.stats.set(int64_t(at), largest[i]), results.stats.set(int64_t(at) + 1, sum[i]);
    results.stats.set(kDenseStats * int64_t(i / 2) + 4, INFINITY);
  }
  const int count = divergence_count(c.kind);
  const double eps = c.arithmetic() == DType::kFloat64 ? 0x1p-52 : 0x1p-23;
  // Merges sums. Changes log_ratio of the rows that are near, and returns true if there are some whose sums it changes.
  const auto sums_are_rough = [&](bool corrects) {
    std::vector<double> sums(size_t(results.sums.count()), 0);
    results.stats.upload();
    for (size_t s = 0; s < c.ends.size(); ++s) {
      run(args_of(DenseStep::kSums, s));
      results.sums.download();
      for (size_t i = 0; i < sums.size(); ++i) sums[i] += results.sums.get(int64_t(i));
    }
    for (size_t i = 0; i < sums.size(); ++i) results.sums.set(int64_t(i), sums[i]);
    results.sums.upload();
    bool rough = false;
    for (int64_t r = 0; r < c.rows; ++r) {
      double divergence[kMostDivergences] = {};
      for (int k = 0; k < count; ++k) divergence[k] = sums[size_t(k * c.rows + r)];
      const int64_t at = kDenseStats * r;
      const double log_ratio = results.stats.get(at + 4);
      if (std::isfinite(log_ratio) && corrects) {
        const double error = std::log1p(sums[size_t((2 * count + 1) * c.rows + r)]);
        results.stats.set(at + 4, log_ratio + error);
        rough = rough || is_rough(c.kind, c.beta, divergence[0], error);
      } else if (!std::isfinite(log_ratio) && p.compares(r) && is_near(c.kind, c.beta, divergence)) {
        const double ratio = std::log(results.stats.get(at + 1)) - std::log(results.stats.get(at + 3));
        results.stats.set(at + 4, std::fabs(ratio) < 16 * eps ? 0 : ratio), rough = true;
      }
    }
    return rough;
  };
  if (sums_are_rough(false) && sums_are_rough(true)) sums_are_rough(false);
  results.stats.upload();
  for (size_t s = 0; s < c.ends.size(); ++s) run(args_of(DenseStep::kGradient, s));
}

// Returns the bound of a number in a row with NaN, or of any other number.
double bound_of(real bound) { return std::isnan(bound) ? INFINITY : double(bound); }

void check_row(const Problem& p, const Results& results, const Array& gradient, int64_t r) {
  const Case& c = p.c;
  const double log_ratio = results.stats.get(kDenseStats * r + 4);
  const Exact exact(p, r, log_ratio);
  const bool near = std::isfinite(log_ratio);
  const int count = divergence_count(c.kind);
  const bool compares = p.compares(r), reads = compares || p.label(r) >= 0;
  for (int k = 0; k < 2; ++k) {
    const double max = results.stats.get(kDenseStats * r + 2 * k), sum = results.stats.get(kDenseStats * r + 2 * k + 1);
    if (k == 0 ? reads : compares) {
      compare("lse", r, k, max + std::log(sum), double(exact.lse[k]), bound_of(exact.lse_bound));
      if (!std::isnan(exact.lse[k])) compare("max", r, k, max, double(exact.max[k]), bound_of(exact.lse_bound));
    } else {
      compare_bits("max of a row that is not read", r, k, max, 0), compare_bits("sum", r, k, sum, 0);
    }
  }
  if (exact.agrees && !near) fail("log_ratio of a row that agrees", r, 0, log_ratio, 0, 0);
  if (!near) {
    compare_bits("log_ratio of another row", r, 0, log_ratio, INFINITY);
    compare_bits("sum of q - p of another row", r, 0, results.sums.get((2 * count + 1) * c.rows + r), 0);
  }
  bool infinite = false;
  for (int k = 0; k < count; ++k) {
    const double d = results.sums.get(k * c.rows + r), slope = results.sums.get((count + 1 + k) * c.rows + r);
    compare("divergence", r, k, d, double(exact.term[k]), bound_of(exact.term_bound[k]) + 1e-36);
    if (c.kind != Divergence::kForwardKl)  // is not read then
      compare("sum of slopes", r, k, slope, double(exact.slope[k]), bound_of(exact.slope_bound[k]) + 1e-36);
    const double within = c.arithmetic() == DType::kFloat64 ? bounded(c.kind, k, c.beta, d)
                                                            : double(bounded(c.kind, k, c.beta, float(d)));
    if (c.ends.empty()) compare_bits("divergence within its bounds", r, k, d, within);
    infinite = infinite || (std::isinf(exact.slope[k]) && p.grad_of(k, r) != 0);
  }
  compare("loss", r, 0, results.sums.get(count * c.rows + r), double(exact.loss), bound_of(exact.loss_bound));
  for (int64_t v = 0; v < c.student.columns; ++v) {
    const double ours = gradient.get(r * results.grad_row_stride + v);
    if (exact.zero || v >= c.classes)
      compare_bits("zero of the gradient", r, v, ours, 0);
    else if (!infinite)
      compare("gradient", r, v, ours, double(exact.grad[v]), bound_of(exact.bound[v]));
  }
}

void run_case(const Case& c) {
  Problem p(c);
  Results results(c, false), at_once(c, c.in_place);
  if (c.ends.empty()) {
    for (const DenseStep step : {DenseStep::kForward, DenseStep::kGradient}) {
      DenseDivergenceArgs args = p.args(step);
      results.give(args, results.grad.device());
      run(args);
    }
  } else {
    run_shards(p, results, results.grad.device());
  }
  for (Array* a : {&results.stats, &results.sums, &results.grad}) a->download();
  for (int64_t r = 0; r < c.rows; ++r) check_row(p, results, results.grad, r);

  // A call that also computes the gradient, in place if possible, gives the same bits.
  Array& gradient = c.in_place ? p.student : at_once.grad;
  if (c.ends.empty()) {
    DenseDivergenceArgs args = p.args(DenseStep::kWithGradient);
    at_once.give(args, gradient.device());
    run(args);
  } else {
    run_shards(p, at_once, gradient.device());
  }
  for (Array* a : {&at_once.stats, &at_once.sums, &gradient}) a->download();
  for (int64_t i = 0; i < results.stats.count(); ++i)
    compare_bits("statistics at once", i / kDenseStats, i % kDenseStats, at_once.stats.get(i), results.stats.get(i));
  for (int64_t i = 0; i < results.sums.count(); ++i)
    compare_bits("sums at once", i % c.rows, i / c.rows, at_once.sums.get(i), results.sums.get(i));
  for (int64_t r = 0; r < c.rows; ++r)
    for (int64_t v = 0; v < c.student.columns; ++v)
      compare_bits("gradient at once", r, v, gradient.get(r * at_once.grad_row_stride + v),
                   results.grad.get(r * results.grad_row_stride + v));
}

Kinds kind_of(const Case& c) {
  static const char* const names[] = {"forward KL", "reverse KL", "JSD",       "skew forward", "skew reverse",
                                      "alpha",      "TV",         "Hellinger", "several"};
  if (c.rows == 0) return {"nothing"};
  Kinds kinds = {names[int(c.kind)]};
  if (!c.ends.empty()) {
    kinds.push_back("shards");
  } else {
    DenseDivergenceArgs shape{};
    shape.classes = c.classes, shape.student.dtype = c.student.dtype, shape.teacher.dtype = c.teacher.dtype;
    const int blocks = cuda::blocks_of_row(shape);
    kinds.push_back(blocks == 0 ? "a warp" : blocks == 1 ? "a block" : std::to_string(blocks) + " blocks");
  }
  if (c.agrees) kinds.push_back(c.apart > 0 ? "agreeing rows" : "equal rows");
  if (c.in_place) kinds.push_back("in place");
  if (c.student.column_stride != 1) kinds.push_back("strided classes");
  if (c.student.dtype != c.teacher.dtype) kinds.push_back("two dtypes");
  return kinds;
}

}  // namespace
}  // namespace sparse_ce

int main(int argc, char** argv) {
  using namespace sparse_ce;
  return run_seeds(argc, argv, draw, kind_of, run_case);
}
