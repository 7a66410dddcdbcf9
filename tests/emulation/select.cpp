// Log-probabilities of chosen classes, their neighbours and their gradients against a float64 reference.
#include "rows.h"

#include "../../csrc/cuda/select.cu"
#include "../../csrc/cuda/cross_entropy.cu"
#include "../../csrc/cuda/one_pass.cu"

namespace {

struct SelectCase : Case {
  bool loss, log_rest, entropy, mean_logit, argmax, row_scale, grad_scale;
  std::string text() const {
    char out[128];
    std::snprintf(out, sizeof(out),
                  " loss %d log_rest %d entropy %d mean_logit %d argmax %d row_scale %d grad_scale %d", loss, log_rest,
                  entropy, mean_logit, argmax, row_scale, grad_scale);
    return Case::text() + out;
  }
};

SelectCase draw_select(bool small) {
  SelectCase c{};
  static_cast<Case&>(c) = draw(small);
  c.shift = 0;  // what large logits lose is the loss's test
  c.logit_size = one_of<double>({1, 5});
  c.loss = chance(0.4), c.log_rest = chance(0.6), c.entropy = chance(0.6), c.mean_logit = chance(0.4);
  c.argmax = chance(0.5), c.row_scale = chance(0.3), c.grad_scale = chance(0.3);
  if (!c.loss) c.options.label_smoothing = c.options.z_loss = 0;
  c.ties = c.vocab < 2000 && chance(0.5);  // of more, the roundings of equal terms add up beyond what is allowed
  if (c.ties) {  // among the entries of one thread, too
    c.logit_size = 1;
    if (c.layout != Case::kIndex) c.width = 90;
  }
  return c;
}

// The upstream gradients and the scales of the rows.
struct Upstreams {
  Array loss, lse, log_probs, log_rest, entropy, mean_logit, scale;

  Upstreams(const SelectCase& c, const Problem& p)
      : loss(c.arithmetic, c.rows), lse(c.arithmetic, c.rows), log_probs(c.arithmetic, p.indices.count()),
        log_rest(c.arithmetic, c.rows), entropy(c.arithmetic, c.rows), mean_logit(c.arithmetic, c.rows),
        scale(c.arithmetic, c.rows) {
    for (int64_t r = 0; r < c.rows; ++r) {
      const bool none = chance(0.15);  // a row that nobody wants a gradient of
      for (Array* a : {&loss, &lse, &log_rest, &entropy, &mean_logit}) a->set(r, none ? 0 : uniform(-1, 1));
      scale.set(r, p.ignored(r) ? NAN : uniform(0.4, 1.3));
      for (int64_t i = p.begin[r]; i < p.end[r]; ++i) log_probs.set(i, none || chance(0.2) ? 0 : uniform(-1, 1));
    }
    for (Array* a : {&loss, &lse, &log_probs, &log_rest, &entropy, &mean_logit, &scale}) a->upload();
  }
};

struct Exact {
  double lse = 0, log_rest = 0, entropy = 0, mean_logit = 0, argmax = -1, size = 0, of_scale = 0, scale_size = 0;
  bool counts, invalid = false;
  std::vector<double> log_probs, grad, bound;

  Exact(const SelectCase& c, const Problem& p, const Upstreams& g, int64_t r)
      : counts(!p.ignored(r)), log_probs(size_t(p.end[r] - p.begin[r])), grad(size_t(c.vocab)), bound(size_t(c.vocab)) {
    if (!counts) return;
    const int64_t n = c.num_classes;
    const double eps = c.arithmetic == DType::kFloat64 ? 2.3e-16 : 1.2e-7, few = 24 * eps,
                 e = c.options.label_smoothing;
    const double row_scale = c.row_scale ? g.scale.get(r) : 1, s = c.options.logit_scale * row_scale;
    std::vector<double> z(n), cap(n), target(n), x(n);
    std::vector<char> inside(n);
    double max = -INFINITY, sum = 0, weights = 0;
    long double total = 0;
    for (int64_t v = 0; v < n; ++v) {
      x[v] = p.logits.get(r * c.row_stride + v);
      const double t = c.options.softcap ? std::tanh(s * x[v] / c.options.softcap) : 0;
      z[v] = c.options.softcap ? c.options.softcap * t : s * x[v];
      cap[v] = 1 - t * t;
      if (z[v] > max) max = z[v], argmax = double(v);
      if (std::isfinite(z[v])) size = std::fmax(size, std::fabs(z[v]));
      total += z[v];
    }
    if (argmax < 0) argmax = 0;
    mean_logit = double(total / n);
    for (double a : z) sum += std::exp(a - max);
    lse = max + std::log(sum);
    double mass = 0, upstream = 0, absolute = 0;
    bool wanted = false;
    for (int64_t i = p.begin[r]; i < p.end[r]; ++i) {
      const int64_t column = int64_t(p.indices.get(i));
      const bool padding = p.padding(i) || column == kIgnore;
      log_probs[i - p.begin[r]] = -7;  // padding_value
      if (padding) continue;
      if (column < 0 || column >= n) {
        invalid = true;
        continue;
      }
      const double w = p.value_of(i);  // 0 where it underflows: chosen all the same
      inside[column] = 1;
      log_probs[i - p.begin[r]] = z[column] - lse;  // NaN where there is no distribution
      wanted = wanted || g.log_probs.get(i) != 0;
      upstream += g.log_probs.get(i);
      target[column] -= g.log_probs.get(i);
      absolute += std::fabs(g.log_probs.get(i));
      if (c.loss) {
        mass += w * p.weight_of(column);
        absolute += std::fabs(w * p.weight_of(column) * g.loss.get(r));
        target[column] += (1 - e) * g.loss.get(r) * w * p.weight_of(column);
      }
    }
    const bool dead = max == -INFINITY;  // no distribution
    double rest_max = -INFINITY, rest = 0;
    for (int64_t v = 0; v < n; ++v)
      if (!inside[v]) rest_max = std::fmax(rest_max, z[v]);
    for (int64_t v = 0; v < n; ++v)
      if (!inside[v] && rest_max > -INFINITY) rest += std::exp(z[v] - rest_max);
    log_rest = dead ? NAN : rest_max == -INFINITY ? -INFINITY : rest_max + std::log(rest) - lse;
    for (int64_t v = 0; v < n; ++v) {
      const double q = std::exp(z[v] - lse);
      if (q > 0) entropy -= q * (z[v] - lse);
      weights += p.weight_of(v);
    }
    if (dead) lse = -INFINITY, entropy = NAN;
    const double g_loss = c.loss ? g.loss.get(r) : 0, g_lse = c.has_grad_lse ? g.lse.get(r) : 0;
    const double g_rest = c.log_rest && rest_max > -INFINITY ? g.log_rest.get(r) : 0;
    const double g_entropy = c.entropy ? g.entropy.get(r) : 0, g_mean = c.mean_logit ? g.mean_logit.get(r) : 0;
    if (!wanted && g_loss == 0 && g_lse == 0 && (!c.log_rest || g.log_rest.get(r) == 0) && g_entropy == 0 &&
        g_mean == 0)
      return;
    const double a =
        g_loss * ((1 - e) * mass + e / double(n) * weights + 2 * c.options.z_loss * lse) + g_lse - upstream - g_rest;
    const double all = std::fabs(a) + absolute + std::fabs(g_rest) + std::fabs(g_entropy) * (std::fabs(entropy) + 1) +
                       std::fabs(g_loss) * (2 * c.options.z_loss * std::fabs(lse) + e / double(n) * weights);
    const double ulp = c.dtype == DType::kFloat16 ? 0x1p-11 : c.dtype == DType::kBFloat16 ? 0x1p-8 : eps;
    for (int64_t v = 0; v < n; ++v) {
      const double log_q = z[v] - lse, q = std::exp(log_q);
      double dz = q > 0 ? q * (a - g_entropy * (log_q + entropy)) : 0;
      dz += g_mean / double(n) - g_loss * e / double(n) * p.weight_of(v) - target[v];
      if (!inside[v] && q > 0) dz += g_rest * std::exp(z[v] - lse - log_rest);
      const double slope = s * cap[v];
      grad[v] = invalid || dead ? NAN : dz * slope;
      const double parts =
          (q > 0 ? all * q * (1 + std::fabs(log_q) + size) : 0) + std::fabs(g_mean) / double(n) +
          std::fabs(g_loss) * e / double(n) * p.weight_of(v) + (target[v] != 0 ? absolute : 0) +
          (q > 0 && !inside[v] ? std::fabs(g_rest) * std::exp(z[v] - lse - log_rest) * (2 + size + std::fabs(log_rest))
                               : 0);
      bound[v] =
          ulp * std::fabs(grad[v]) + few * parts * (std::fabs(slope) + 1) + 6e-8 * (c.dtype == DType::kFloat16) + 1e-37;
      const double of_x = c.options.logit_scale * cap[v] * x[v];
      of_scale += dz == 0 ? 0 : dz * of_x;
      if (std::isfinite(of_x)) scale_size += parts * std::fabs(of_x) + std::fabs(dz * of_x);
    }
    if (invalid || dead) of_scale = NAN;
  }
};

void run_select(const SelectCase& c) {
  Problem p(c);
  const Upstreams g(c, p);
  Array loss(c.arithmetic, c.rows), lse(c.arithmetic, c.rows), residual(c.arithmetic, c.rows);
  Array log_rest(c.arithmetic, c.rows), entropy(c.arithmetic, c.rows), mean_logit(c.arithmetic, c.rows);
  Array argmax(DType::kInt64, c.rows), log_probs(c.arithmetic, p.indices.count()), of_scale(c.arithmetic, c.rows);
  for (Array* a : {&loss, &lse, &residual, &log_rest, &entropy, &mean_logit, &argmax, &log_probs, &of_scale}) {
    for (int64_t i = 0; i < a->count(); ++i) a->set(i, 77);
    a->upload();
  }
  SelectArgs forward{};
  p.fill(forward);
  forward.row_scale = c.row_scale ? g.scale.device() : nullptr, forward.row_scale_stride = 1;
  forward.loss = c.loss ? loss.device() : nullptr;
  forward.lse = lse.device(), forward.lse_residual = residual.device(), forward.log_probs = log_probs.device();
  forward.log_rest = c.log_rest ? log_rest.device() : nullptr, forward.entropy = c.entropy ? entropy.device() : nullptr;
  forward.mean_logit = c.mean_logit ? mean_logit.device() : nullptr;
  forward.argmax = c.argmax ? static_cast<int64_t*>(argmax.device()) : nullptr;
  forward.padding_value = -7;
  Array space(DType::kInt32, int64_t(cuda::select_forward_workspace(forward) + 3) / 4);
  must(cuda::select_forward(forward, space.device(), nullptr), "forward");

  SelectBackwardArgs backward{};
  p.fill(backward);
  backward.row_scale = forward.row_scale, backward.row_scale_stride = 1;
  backward.lse = lse.device(), backward.lse_residual = residual.device();
  backward.grad_loss = c.loss ? g.loss.device() : nullptr, backward.grad_loss_stride = 1;
  backward.grad_lse = c.has_grad_lse ? g.lse.device() : nullptr, backward.grad_lse_stride = 1;
  backward.grad_log_probs = g.log_probs.device();
  if (c.log_rest) backward.grad_log_rest = {g.log_rest.device(), 1}, backward.log_rest = log_rest.device();
  if (c.entropy) backward.grad_entropy = {g.entropy.device(), 1}, backward.entropy = entropy.device();
  if (c.mean_logit) backward.grad_mean_logit = {g.mean_logit.device(), 1};
  backward.grad_scale = c.grad_scale ? of_scale.device() : nullptr;
  std::vector<Exact> exact;
  for (int64_t r = 0; r < c.rows; ++r) exact.emplace_back(c, p, g, r);
  Array fresh(c.dtype, c.rows * c.vocab, c.in_place ? 0 : below(3) * 4);
  for (int64_t i = 0; i < fresh.count(); ++i) fresh.set(i, 777);
  fresh.upload();
  Array& gradient = c.in_place ? p.logits : fresh;
  backward.grad_logits = gradient.device();
  backward.grad_row_stride = c.in_place ? c.row_stride : c.vocab;
  Array entries(DType::kFloat64, int64_t(cuda::cross_entropy_backward_workspace(backward) + 7) / 8);
  must(cuda::select_backward(backward, entries.device(), nullptr), "backward");

  for (Array* a : {&lse, &log_rest, &entropy, &mean_logit, &argmax, &log_probs, &of_scale, &gradient}) a->download();
  const double few = 24 * (c.arithmetic == DType::kFloat64 ? 2.3e-16 : 1.2e-7);
  for (int64_t r = 0; r < c.rows; ++r) {
    const Exact& x = exact[r];
    const double bound = few * (2 * x.size + std::fabs(x.lse) + 2);
    const auto of_row = [&](double value) { return !x.counts ? 0 : x.invalid ? NAN : value; };
    compare("lse", r, 0, lse.get(r), of_row(x.lse), bound);
    if (c.log_rest) compare("log_rest", r, 0, log_rest.get(r), of_row(x.log_rest), bound);
    if (c.entropy) compare("entropy", r, 0, entropy.get(r), of_row(x.entropy), bound * (1 + x.entropy));
    if (c.mean_logit) compare("mean_logit", r, 0, mean_logit.get(r), of_row(x.mean_logit), 4 * bound);
    if (c.argmax && c.options.softcap == 0) compare("argmax", r, 0, argmax.get(r), x.counts ? x.argmax : -1, 0);
    for (int64_t i = p.begin[r]; i < p.end[r]; ++i)
      compare("log_probs", r, i, log_probs.get(i), of_row(x.log_probs[i - p.begin[r]]), bound);
    for (int64_t v = 0; v < c.vocab; ++v)
      compare("grad", r, v, gradient.get(r * backward.grad_row_stride + v), x.grad[v], x.bound[v]);
    if (c.grad_scale) compare("of_scale", r, 0, of_scale.get(r), x.of_scale, few * x.scale_size + 1e-30);
  }
}

std::string kind_of(const SelectCase& c) {
  CrossEntropyArgs shape{};
  shape.rows = c.rows, shape.vocab = c.vocab, shape.dtype = c.dtype, shape.target.num_classes = c.num_classes;
  if (c.rows == 0) return "nothing";
  const cuda::Plan plan = cuda::plan_of(shape, cuda::multiprocessors());
  return plan.width == cuda::kWarp ? "warp a row" : plan.splits == 1 ? "block a row" : "blocks a row";
}

}  // namespace

int main(int argc, char** argv) { return run_seeds(argc, argv, draw_select, kind_of, run_select); }
