// The loss against a float64 reference.
#include "rows.h"

#include <memory>
#include <string>

#include "../../csrc/cuda/cross_entropy.cu"
#include "../../csrc/cuda/loss_mean.cu"
#include "../../csrc/cuda/one_pass.cu"

namespace sparse_ce {
namespace {

// A row in float64, straight from the definition, with the bounds that rounding in the arithmetic dtype allows.
struct Exact {
  double loss = 0, lse = 0, loss_bound = 0, lse_bound = 0;
  std::vector<double> grad, grad_bound, grad_values, grad_values_bound;  // grad_values by entry of the row

  Exact(const Problem& p, int64_t r) : grad(size_t(p.c.vocab)), grad_bound(size_t(p.c.vocab)) {
    const Case& c = p.c;
    grad_values.resize(size_t(p.end[r] - p.begin[r]));
    grad_values_bound.resize(grad_values.size());
    if (p.ignored(r)) return;
    const double eps = c.arithmetic == DType::kFloat64 ? 2.3e-16 : 1.2e-7, few = 24 * eps;
    const int64_t n = c.num_classes;
    std::vector<double> z(static_cast<size_t>(n)), slope(static_cast<size_t>(n)), target(static_cast<size_t>(n));
    double max = -INFINITY, size = 0;
    for (int64_t v = 0; v < n; ++v) {
      const double x = c.options.logit_scale * p.logits.get(c.at(r, v));
      const double t = c.options.softcap ? std::tanh(x / c.options.softcap) : 0;
      z[v] = c.options.softcap ? c.options.softcap * t : x;
      slope[v] = c.options.logit_scale * (1 - t * t);
      max = std::fmax(max, z[v]);
      if (std::isfinite(z[v])) size = std::fmax(size, std::fabs(z[v]));
    }
    long double sum = 0;
    for (double x : z) sum += std::exp((long double)(x - max));
    const long double exact_lse = max == -INFINITY ? max : max + std::log(sum);
    lse = double(exact_lse);  // a row of nothing but -inf: lse -inf, the rest NaN
    lse_bound = few * (size + std::fabs(lse) + 1);

    const double e = c.options.label_smoothing;
    // A logit that was scaled or capped was rounded: exp makes its absolute error a relative one.
    const double rounded_z = c.options.logit_scale != 1 || c.options.softcap != 0 ? size : 0;
    double mass = 0, absolute = 0;
    for (int64_t i = p.begin[r]; i < p.end[r]; ++i) {
      const int64_t column = int64_t(p.indices.get(i));
      const double value = p.value_of(i);
      if (p.padding(i) || column == kIgnore) continue;
      if (column < 0 || column >= n) {
        mass = NAN;
        continue;
      }
      const double w = value * p.weight_of(column);
      if (value == 0) continue;
      const double factor = p.weight_of(column) * (c.logprobs ? value : 1), by = p.grad_of(r) * (1 - e) * factor;
      const bool nothing =
          c.arithmetic == DType::kFloat32 && float(p.weight_of(column)) * float(c.logprobs ? value : 1) == 0;
      const double g = nothing ? 0 : by * double(exact_lse - z[column]);
      if (by != 0) {
        grad_values[i - p.begin[r]] = g;
        grad_values_bound[i - p.begin[r]] = few * (std::fabs(g) + 3 * size + 1);
      }
      mass += w, absolute += std::fabs(w);
      target[column] += w;
      if (w != 0) loss += (1 - e) * w * double(exact_lse - z[column]);
    }
    loss_bound = few * (absolute * (2 * size + std::fabs(lse) + 1) + c.options.z_loss * (lse * lse + 1) + 1e-3);
    long double total = 0, smooth = 0;
    for (int64_t v = 0; v < n; ++v) {
      total += p.weight_of(v);
      if (e != 0 && p.weight_of(v) != 0) smooth += p.weight_of(v) * double(exact_lse - z[v]);
    }
    const double total_weight = double(total);
    loss += e / double(n) * double(smooth) + c.options.z_loss * lse * lse;
    if (e != 0) loss_bound += few * (total_weight / double(n) * (2 * size + std::fabs(lse) + 1)) * 8;
    if (std::isnan(mass) || max == -INFINITY) loss = NAN;

    const double g = p.grad_of(r), g_lse = c.has_grad_lse ? p.grad_lse.get(r) : 0;
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
                      6e-8 * (c.dtype == DType::kFloat16) + 1e-37;
    }
  }
};

// Rows as they were drawn, or some of them side by side.
Case draw_rows(bool small) {
  Case c = draw(small);
  c.reads = chance(0.5) ? Reads::kPlanned : chance(0.5) ? Reads::kApart : Reads::kCached;
  if (chance(0.06)) {  // the longest rows that are read once
    c.rows = 1, c.row_stride = c.num_classes = c.vocab = size_of(c.dtype) == 2 ? 140001 : 70003;
    if (chance(0.8)) c.reads = Reads::kPlanned;
  } else if (chance(0.09)) {  // those of a few blocks
    const int64_t bytes = (int64_t(32768) << below(3)) * (256 + 1 + below(255)) / 256;
    c.rows = 1 + below(2), c.row_stride = c.num_classes = c.vocab = bytes / size_of(c.dtype);
    c.reads = Reads::kPlanned;
  }
  if (c.rows > 0 && c.vocab <= 8 && chance(0.2)) {  // a mean by a cluster
    c.rows = cuda::kBlockRows + 1 + below(small ? 9 : 9000), c.width = std::min<int64_t>(c.width, 3);
    c.logprobs = false;  // weights that underflow are for other cases
    c.strided = {c.rows, c.vocab * c.rows, c.rows};
    return c;
  }
  if (c.rows == 0 || c.vocab > 5000 || chance(0.6)) return c;
  if (c.vocab <= 33 && chance(0.4)) c.rows = 100 + below(400);  // several blocks, or several rows a thread
  const int64_t inner = chance(0.3) ? c.rows : 1 + below(c.rows), outer = c.rows / inner;
  c.rows = outer * inner;
  const int64_t gap = chance(0.3) ? below(9) : 0;
  c.strided = {inner, c.vocab * (inner + gap) + gap, inner + gap};
  if (chance(0.3)) c.strided = {inner, inner, outer * inner + gap};  // classes first
  return c;
}

int64_t place(const BackwardArgs& args, int64_t r, int64_t v) {
  const StridedRows& rows = args.grad_strided;
  if (rows.inner == 0) return r * args.grad_row_stride + v;
  return r / rows.inner * rows.outer_stride + r % rows.inner + v * rows.column_stride;
}

// Loss and gradient by one read; `over`: the gradient overwrites a copy of the logits.
struct ByOneRead {
  const Case& c;
  const bool over;
  Array loss, lse, residual, gradient;

  ByOneRead(const Problem& p, ForwardArgs forward, BackwardArgs backward, bool over)
      : c(p.c), over(over), loss(c.arithmetic, c.rows), lse(c.arithmetic, c.rows), residual(c.arithmetic, c.rows),
        gradient(c.dtype, over ? c.logits_count() : c.rows * c.vocab, over ? c.offset : below(9)) {
    for (int64_t i = 0; i < gradient.count(); ++i) gradient.set(i, over ? p.logits.get(i) : 777);
    gradient.upload();
    forward.loss = loss.device(), forward.lse = lse.device(), forward.lse_residual = residual.device();
    backward.lse = lse.device(), backward.lse_residual = residual.device();
    if (over) forward.logits = backward.logits = gradient.device();
    backward.grad_logits = gradient.device(), backward.grad_row_stride = row_stride();
    Array entries(DType::kFloat64, int64_t(cuda::cross_entropy_backward_workspace(backward) + 7) / 8);
    cuda::OnePass form = cuda::one_pass_of(forward);
    if (form.rows > 0 && chance(0.5)) form.rows = 1 + below(2);  // a smaller cache
    must(cuda::cross_entropy_one_pass(form, forward, &backward, entries.device(), nullptr), "one pass");
#if !defined(__CUDACC__)
    const double most = double(form.rows * form.cluster), blocks = double(coc::last_stats().blocks);
    if (form.rows > 0 && c.max_blocks == 0) compare("blocks at a time", 0, 0, std::max(blocks, most), most, 0);
#endif
    for (Array* a : {&loss, &lse, &residual, &gradient}) a->download();
  }
  int64_t row_stride() const { return over ? c.row_stride : c.vocab; }
};

void run_case(const Case& c) {
  Problem p(c);
  Array loss(c.arithmetic, c.rows), lse(c.arithmetic, c.rows), residual(c.arithmetic, c.rows);
  for (Array* a : {&loss, &lse, &residual}) {
    for (int64_t i = 0; i < a->count(); ++i) a->set(i, 1e30);
    a->upload();
  }
  ForwardArgs forward{};
  p.fill(forward);
  forward.loss = loss.device(), forward.lse = lse.device(), forward.lse_residual = residual.device();
  Array forward_space(DType::kInt32, int64_t(cuda::cross_entropy_forward_workspace(forward) + 3) / 4);
  must(cuda::cross_entropy_forward(forward, forward_space.device(), nullptr), "forward");

  Array mean(c.arithmetic, 1), divisor(c.arithmetic, 1), normalizer(c.arithmetic, 1), upstream(c.arithmetic, 1);
  const bool normalized = below(3) == 0;
  normalizer.set(0, double(below(4)) - 0.5 * below(2)), upstream.set(0, 0.75);
  normalizer.upload(), upstream.upload();
  LossMeanArgs average{};
  average.loss = loss.device(), average.loss_stride = 1, average.dtype = c.arithmetic, average.target = forward.target;
  average.normalizer = normalized ? normalizer.device() : nullptr;
  average.mean = mean.device(), average.divisor = divisor.device();
  must(cuda::loss_mean(average, nullptr), "mean");
  Array ahead_divisor(c.arithmetic, 1), ahead_grad(c.arithmetic, 1);  // as before the losses are known
  average.loss = average.mean = nullptr;
  average.grad_mean = upstream.device(), average.grad_loss = ahead_grad.device(),
  average.divisor = ahead_divisor.device();
  must(cuda::loss_mean(average, nullptr), "divisor");

  BackwardArgs backward{};
  p.fill(backward);
  backward.grad_loss = p.grad_loss.device(), backward.grad_loss_stride = c.unit_stride_grad ? 1 : 0;
  backward.grad_lse = c.has_grad_lse ? p.grad_lse.device() : nullptr, backward.grad_lse_stride = 1;
  backward.lse = lse.device(), backward.lse_residual = residual.device();

  Array grad_values(c.arithmetic, p.indices.count());
  for (int64_t i = 0; i < grad_values.count(); ++i) grad_values.set(i, 0);
  grad_values.upload();
  backward.grad_values = grad_values.device();
  must(cuda::cross_entropy_backward_values(backward, nullptr), "backward_values");

  Array fresh(c.dtype, c.rows * c.vocab, c.in_place ? 0 : below(3) * 4);
  for (int64_t i = 0; i < fresh.count(); ++i) fresh.set(i, 776);
  fresh.upload();
  Array& gradient = c.in_place ? p.logits : fresh;
  backward.grad_logits = gradient.device();
  backward.grad_row_stride = c.in_place ? c.row_stride : c.vocab;
  backward.grad_strided = c.strided;
  if (c.strided.inner && !c.in_place)
    backward.grad_strided = {c.strided.inner, c.vocab * c.strided.inner, c.strided.inner};
  Array entries(DType::kFloat64, int64_t(cuda::cross_entropy_backward_workspace(backward) + 7) / 8);

  std::vector<Exact> exact;
  for (int64_t r = 0; r < c.rows; ++r) exact.emplace_back(p, r);

  std::vector<std::unique_ptr<ByOneRead>> by_one_read;
  for (const bool over : {false, true})
    if (cuda::one_pass_of(forward)) by_one_read.emplace_back(new ByOneRead(p, forward, backward, over));

  Array other(c.arithmetic, 1);
  other.set(0, 0.5), other.upload();
  if (!c.in_place && chance(0.5)) {
    backward.made_for = backward.grad_mean = upstream.device();
    must(cuda::cross_entropy_backward(backward, entries.device(), nullptr), "backward of what is made");
    fresh.download();
    for (int64_t i = 0; i < fresh.count(); ++i) compare("what is made", 0, i, fresh.get(i), 776, 0);
    backward.grad_mean = other.device();
  }
  must(cuda::cross_entropy_backward(backward, entries.device(), nullptr), "backward");
  for (Array* a : {&loss, &lse, &residual, &mean, &divisor, &ahead_divisor, &ahead_grad, &gradient, &grad_values})
    a->download();
  double total = 0, count = 0, size = 0;
  for (int64_t r = 0; r < c.rows; ++r) {
    const int64_t label = c.layout == Case::kIndex ? int64_t(p.indices.get(r)) : 0;
    const bool is_label = c.layout == Case::kIndex && 0 <= label && label < c.num_classes;
    total += loss.get(r), size += std::fabs(loss.get(r));
    count += p.ignored(r) ? 0 : is_label && c.has_weight ? p.weight.get(label) : 1;
  }
  if (normalized) count = normalizer.get(0);
  compare("mean", 0, 0, mean.get(0), count == 0 ? 0 : total / count, 1e-6 * size / std::fabs(count));
  compare("divisor", 0, 0, divisor.get(0), count == 0 ? INFINITY : count, 1e-6 * std::fabs(count));
  compare("divisor ahead", 0, 0, ahead_divisor.get(0), divisor.get(0), 0);
  compare("gradient ahead", 0, 0, ahead_grad.get(0), 0.75 / divisor.get(0), 1e-6 / std::fabs(divisor.get(0)));
  for (int64_t r = 0; r < c.rows; ++r) {
    compare("loss", r, 0, loss.get(r), exact[r].loss, exact[r].loss_bound);
    compare("lse", r, 0, lse.get(r), exact[r].lse, exact[r].lse_bound);
    for (int64_t v = 0; v < c.vocab; ++v)
      compare("grad", r, v, gradient.get(place(backward, r, v)), exact[r].grad[v], exact[r].grad_bound[v]);
    for (const auto& one : by_one_read) {  // bit for bit
      compare("loss by one read", r, 0, one->loss.get(r), loss.get(r), 0);
      compare("lse by one read", r, 0, one->lse.get(r), lse.get(r), 0);
      compare("residual by one read", r, 0, one->residual.get(r), residual.get(r), 0);
      for (int64_t v = 0; v < c.vocab; ++v)
        compare("grad by one read", r, v, one->gradient.get(r * one->row_stride() + v),
                gradient.get(place(backward, r, v)), 0);
    }
    for (int64_t i = p.begin[r]; i < p.end[r]; ++i)
      compare("grad_values", r, i, grad_values.get(i), exact[r].grad_values[i - p.begin[r]],
              exact[r].grad_values_bound[i - p.begin[r]]);
  }
}

std::string kind_of(const Case& c) {
  CrossEntropyArgs shape{};
  shape.rows = c.rows, shape.vocab = c.vocab, shape.dtype = c.dtype, shape.target.num_classes = c.num_classes;
  shape.row_stride = c.row_stride, shape.strided = c.strided, shape.reads = c.reads;
  shape.logits = reinterpret_cast<const void*>(c.offset * size_of(c.dtype));
  if (c.rows == 0) return "nothing";
  if (c.strided.inner > 0) return c.rows > cuda::kBlockRows ? "a thread a row, a mean by a cluster" : "a thread a row";
  if (const cuda::OnePass form = cuda::one_pass_of(shape)) {
    const std::string packs = std::to_string(form.packs) + " packs";
    if (form.width == cuda::kWarp) return "one pass, a warp";
    if (form.packs == 0) return form.cluster == 1 ? "in the cache, a block" : "in the cache, 8 blocks";
    return "one pass, " + (form.cluster == 1 ? "a block" : std::to_string(form.cluster) + " blocks, " + packs);
  }
  const cuda::Plan plan = cuda::plan_of(shape, cuda::multiprocessors());
  return plan.width == cuda::kWarp ? "warp a row" : plan.splits == 1 ? "block a row" : "blocks a row";
}

}  // namespace
}  // namespace sparse_ce

int main(int argc, char** argv) {
  using namespace sparse_ce;
  return run_seeds(argc, argv, draw_rows, kind_of, run_case);
}
