// Compares the loss and its gradients with a float64 reference.
#include "loss_rows.h"

#include <memory>

#include "../../csrc/cuda/cross_entropy.cu"
#include "../../csrc/cuda/loss_mean.cu"
#include "../../csrc/cuda/one_pass.cu"
#include "../../csrc/cuda/one_pass_bfloat16.cu"
#include "../../csrc/cuda/one_pass_float.cu"
#include "../../csrc/cuda/one_pass_half.cu"

namespace sparse_ce {
namespace {

// Makes rows adjacent: images with a gap after each row of pixels, or all pixels of a class contiguous.
void lay_side_by_side(LossCase& c) {
  const int64_t inner = chance(0.3) ? c.rows : 1 + below(c.rows), outer = c.rows / inner;
  c.rows = outer * inner;
  const int64_t gap = chance(0.3) ? below(9) : 0;
  c.strided = {inner, c.vocab * (inner + gap) + gap, inner + gap};
  if (chance(0.3)) c.strided = {inner, inner, outer * inner + gap};  // classes first
}

// Draws rows and makes some of them adjacent.
LossCase draw_rows(bool small) {
  LossCase c{};
  static_cast<Case&>(c) = draw(small);
  c.row_weight = chance(0.35), c.row_scale = chance(0.35);
  c.weight_step = below(3), c.scale_step = below(3);
  c.reads = chance(0.7) ? Reads::kPlanned : Reads::kApart;
  c.many_rows = chance(0.3);
  if (chance(0.06)) c.options.logit_scale = Factors::factor();
  // The shift is so large that exponentials with a common factor would overflow; 16-bit logits are far apart there.
  const bool plain = c.options.logit_scale == 1 && c.options.softcap == 0 && !c.row_scale;
  if (plain && c.shift != 0 && size_of(c.dtype) == 2 && chance(0.3))
    c.shift *= c.dtype == DType::kFloat16 ? 50 : one_of<double>({1e5, 1e9});
  if (chance(0.06)) {  // the longest rows that are read once
    c.rows = 1, c.row_stride = c.num_classes = c.vocab = size_of(c.dtype) == 2 ? 140001 : 70003;
    if (chance(0.8)) c.reads = Reads::kPlanned;
  } else if (chance(0.09)) {  // rows of a few blocks, sometimes of several
    const int64_t bytes = (int64_t(32768) << below(3)) * (256 + 1 + below(255)) / 256;
    c.rows = 1 + below(4), c.row_stride = c.num_classes = c.vocab = bytes / size_of(c.dtype) - below(2) * below(8);
    c.reads = Reads::kPlanned;
    if (chance(0.7)) c.max_blocks = 1 + below(2);  // blocks of several rows, sometimes of one more than exists
    if (std::fabs(c.shift) <= 1000 && chance(0.5)) c.reverses = c.row_scale = true, c.scale_step = 1;
  } else if (chance(0.06)) {  // rows of a warp
    const int64_t bytes = 2048 + below(22500);
    c.rows = 1 + below(20), c.row_stride = c.num_classes = c.vocab = bytes / size_of(c.dtype);
    c.reads = Reads::kPlanned, c.many_rows = true;
    if (chance(0.5)) c.max_blocks = 1;
  } else if (chance(0.05)) {  // rows of one block that are not read once
    c.rows = 1 + below(5), c.row_stride = c.num_classes = c.vocab = 5001 + below(90);
    c.reads = Reads::kApart;
  }
  if (c.layout != Case::kIndex && chance(c.vocab > 4000 ? 0.6 : 0.3)) {  // as many entries as threads, or one more
    c.layout = Case::kTopK;
    c.width = one_of<int64_t>(c.vocab > 4000 ? std::vector<int64_t>{32, 33, 128, 129} : std::vector<int64_t>{32, 33});
    c.rows = std::min<int64_t>(c.rows, 9);
  }
  if (c.rows > 0 && c.vocab <= 8 && chance(0.2)) {  // a mean that a cluster computes, if clusters exist
    // Sometimes there are more rows than the threads of a cluster have in flight.
    const int64_t more = small ? 9 : chance(0.1) ? 14000 : 5000;
    c.rows = cuda::kBlockRows + 1 + below(more);
    if (!small && chance(0.25)) c.rows = cuda::kClusterRows + 1 + below(9000);  // or many blocks
    c.width = std::min<int64_t>(c.width, 3);
    c.logprobs = false;  // other cases cover weights that underflow
    c.strided = {c.rows, c.vocab * c.rows, c.rows};
    return c;
  }
  if (chance(0.15)) {
    for (int64_t parts = below(4); parts > 0; --parts) c.ends.push_back(below(c.vocab + 1));
    c.ends.push_back(c.vocab);
    std::sort(c.ends.begin(), c.ends.end());
    return c;
  }
  if (chance(0.06)) {  // split rows, sometimes in parts of several sums
    const bool longest = chance(0.1);
    c.rows = 1 + below(longest ? 2 : small ? 12 : 40), c.vocab = longest ? 32769 + below(20000) : 250 + below(1500);
    c.num_classes = chance(0.6) ? c.vocab : c.vocab - below(20);
    c.many_rows = false;
    lay_side_by_side(c);
    return c;
  }
  if (c.rows == 0 || c.vocab > 5000 || chance(0.6)) return c;
  if (c.vocab <= 33 && chance(0.4)) c.rows = 100 + below(400);  // several blocks, or several rows per thread
  lay_side_by_side(c);
  return c;
}

// Sets infinities and NaN, in active rows too; for a smoothed loss only -inf at classes of weight 0. A scale that is
// not positive turns -inf into NaN, and such a row would not test anything else.
void draw_infinities(const LossCase& c, const Factors& by_row, Problem& p) {
  const bool anywhere = chance(0.15), unweighted = c.has_weight && chance(0.5);
  for (int64_t r = 0; r < c.rows; ++r) {
    if (p.ignored(r)) continue;
    const bool finite = c.options.logit_scale * by_row.scale_of(r) <= 0 && chance(0.9);
    for (int64_t v = 0; (finite || unweighted) && v < c.num_classes; ++v)
      if ((finite || p.weight_of(v) != 0) && !std::isfinite(p.logits.get(c.at(r, v))))
        p.logits.set(c.at(r, v), c.shift + uniform(-c.logit_size, c.logit_size));
    if (anywhere && chance(0.3))
      p.logits.set(c.at(r, below(c.num_classes)), one_of<double>({INFINITY, -INFINITY, std::nan("")}));
  }
  p.logits.upload();
}

int64_t place(const BackwardArgs& args, int64_t r, int64_t v) {
  const StridedRows& rows = args.grad_strided;
  if (rows.inner == 0) return r * args.grad_row_stride + v;
  return r / rows.inner * rows.outer_stride + r % rows.inner + v * rows.column_stride;
}

// Runs the one-pass kernel. If `over` is set, the gradient overwrites a copy of the logits.
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
    must(cuda::cross_entropy_one_pass(cuda::one_pass_of(forward), forward, &backward, nullptr), "one pass");
    for (Array* a : {&loss, &lse, &residual, &gradient}) a->download();
  }
  int64_t row_stride() const { return over ? c.row_stride : c.vocab; }
};

// Calls f with the backward arguments of all classes, or of each part of the classes.
template <typename function_t>
void for_parts(const BackwardArgs& all, const LossCase& c, const function_t& f) {
  if (c.ends.empty()) return f(all);
  BackwardArgs part = all;
  for (const int64_t end : c.ends) {
    part.vocab = end;
    f(part);
    part.first_class = end;
    part.logits = advance(all.logits, c.dtype, end);
    if (all.grad_logits) part.grad_logits = advance(all.grad_logits, c.dtype, end);
  }
}

// Adds the rows in the order of loss_mean: per thread, warp, block and cluster.
LossMeanStats<double> sum_in_order(const std::vector<LossMeanStats<double>>& rows) {
  const auto count = int64_t(rows.size());
  const int64_t parts = cuda::parts_of(count);
  const bool wide = count > cuda::kBlockRows, clusters = cuda::device_runs_clusters();
  const int64_t blocks = parts > 0 ? parts : wide && clusters ? cuda::kMostBlocks : 1;
  const int64_t threads = parts == 0 && wide && !clusters ? cuda::kThreadsAlone : cuda::kThreads;
  std::vector<LossMeanStats<double>> of_blocks;
  for (int64_t block = 0; block < blocks; ++block) {
    LossMeanStats<double> of_block;
    for (int64_t warp = 0; warp < threads; warp += cuda::kWarp) {
      LossMeanStats<double> lanes[cuda::kWarp];
      for (int64_t lane = 0; lane < cuda::kWarp; ++lane)
        for (int64_t r = block * threads + warp + lane; r < count; r += blocks * threads)
          lanes[lane].merge(rows[size_t(r)]);
      for (int half = cuda::kWarp / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; ++lane) lanes[lane].merge(lanes[lane + half]);
      of_block.merge(lanes[0]);
    }
    of_blocks.push_back(of_block);
  }
  if (parts > 0) return sum_in_order(of_blocks);  // threads merge the parts like rows
  LossMeanStats<double> sum;
  for (const auto& of_block : of_blocks) sum.merge(of_block);
  return sum;
}

// Checks the downloaded mean to the last bit.
void check_mean(const LossCase& c, const Problem& p, const Factors& by_row, const Array& loss, const double* normalizer,
                double mean, double divisor) {
  std::vector<LossMeanStats<double>> rows;
  double size = 0;
  for (int64_t r = 0; r < c.rows; ++r) {
    const double by = by_row.weight_of(r);
    const bool ignored = p.ignored(r), counts = by != 0 && !(c.row_weight && ignored);
    rows.push_back({counts ? by * loss.get(r) : 0, normalizer || ignored ? 0 : p.count_of(r)});
    size += std::fabs(rows.back().total);
  }
  LossMeanStats<double> sum = sum_in_order(rows);
  if (normalizer) sum.count = *normalizer;
  const auto rounded = [&](double x) { return c.arithmetic == DType::kFloat64 ? x : double(float(x)); };
  const double exact = rounded(sum.count == 0 ? 0 : sum.total / sum.count);
  if (std::isnan(exact) || (c.arithmetic == DType::kFloat64 && c.row_weight))  // a product may be fused there
    compare("mean", 0, 0, mean, exact, 1e-14 * size / std::fabs(sum.count));
  else
    compare_bits("mean", 0, 0, mean, exact);
  compare_bits("divisor", 0, 0, divisor, sum.count == 0 ? INFINITY : rounded(sum.count));
}

void run_case(const LossCase& c) {
  Problem p(c);
  for (int64_t r = 0; c.layout == Case::kRanges && r < c.rows; ++r)
    if (chance(0.05)) p.lead_outside(r);
  const Factors by_row(c, p);
  draw_infinities(c, by_row, p);
  Array loss(c.arithmetic, c.rows), lse(c.arithmetic, c.rows), residual(c.arithmetic, c.rows);
  for (Array* a : {&loss, &lse, &residual}) {
    for (int64_t i = 0; i < a->count(); ++i) a->set(i, 1e30);
    a->upload();
  }
  ForwardArgs forward{};
  p.fill(forward);
  forward.row_scale = c.row_scale ? by_row.scale.device() : nullptr, forward.row_scale_stride = c.scale_step;
  forward.loss = loss.device(), forward.lse = lse.device(), forward.lse_residual = residual.device();
  Array forward_space(DType::kInt32, int64_t(cuda::workspace_of(forward) + 3) / 4);
  must(cuda::cross_entropy_forward(forward, forward_space.device(), nullptr), "forward");

  Array mean(c.arithmetic, 1), divisor(c.arithmetic, 1), normalizer(c.arithmetic, 1), grad_mean(c.arithmetic, 1);
  const bool normalized = below(3) == 0;
  normalizer.set(0, double(below(4)) - 0.5 * below(2)), grad_mean.set(0, 0.75);
  normalizer.upload(), grad_mean.upload();
  LossMeanArgs average{};
  average.loss = loss.device(), average.loss_stride = 1, average.dtype = c.arithmetic, average.target = forward.target;
  average.row_weight = c.row_weight ? by_row.weight.device() : nullptr, average.row_weight_stride = c.weight_step;
  average.normalizer = normalized ? normalizer.device() : nullptr;
  average.mean = mean.device(), average.divisor = divisor.device();
  Array mean_space(DType::kInt32, int64_t(cuda::workspace_of(average) + 3) / 4);
  must(cuda::loss_mean(average, mean_space.device(), nullptr), "mean");
  Array ahead_divisor(c.arithmetic, 1), ahead_grad(c.arithmetic, 1);  // computed before the losses are known
  average.loss = average.mean = nullptr;
  average.grad_mean = grad_mean.device(), average.grad_loss = ahead_grad.device(),
  average.divisor = ahead_divisor.device();
  must(cuda::loss_mean(average, mean_space.device(), nullptr), "divisor");

  BackwardArgs backward{};
  p.fill(backward);
  backward.row_scale = forward.row_scale, backward.row_scale_stride = forward.row_scale_stride;
  backward.row_weight = average.row_weight, backward.row_weight_stride = average.row_weight_stride;
  backward.grad_loss = p.grad_loss.device(), backward.grad_loss_stride = c.unit_stride_grad ? 1 : 0;
  backward.grad_lse = c.has_grad_lse ? p.grad_lse.device() : nullptr, backward.grad_lse_stride = 1;
  backward.lse = lse.device(), backward.lse_residual = residual.device();

  Array grad_values(c.arithmetic, p.indices.count());
  for (int64_t i = 0; i < grad_values.count(); ++i) grad_values.set(i, 0);
  grad_values.upload();
  backward.grad_values = grad_values.device();
  for_parts(backward, c, [](const BackwardArgs& part) {
    must(cuda::cross_entropy_backward_values(part, nullptr), "backward_values");
  });

  Array fresh(c.dtype, c.rows * c.vocab, c.in_place ? 0 : below(3) * 4);
  for (int64_t i = 0; i < fresh.count(); ++i) fresh.set(i, 776);
  fresh.upload();
  Array& gradient = c.in_place ? p.logits : fresh;
  backward.grad_logits = gradient.device();
  backward.grad_row_stride = c.in_place ? c.row_stride : c.vocab;
  backward.grad_strided = c.strided;
  if (c.strided.inner && !c.in_place)
    backward.grad_strided = {c.strided.inner, c.vocab * c.strided.inner, c.strided.inner};
  Array entries(DType::kFloat64, int64_t(cuda::workspace_of(backward) + 7) / 8);
  for (int64_t i = 0; i < entries.count(); ++i)
    entries.set(i, i % 2 ? 0.1 : 0);  // looks like gradients at class 0 that no kernel computed
  entries.upload();

  std::vector<Exact> exact;
  for (int64_t r = 0; r < c.rows; ++r) exact.emplace_back(p, by_row, r);

  std::vector<std::unique_ptr<ByOneRead>> by_one_read;
  for (const bool over : {false, true})
    if (cuda::one_pass_of(forward) && c.ends.empty())
      by_one_read.emplace_back(new ByOneRead(p, forward, backward, over));

  const auto run_backward = [&](const char* what) {
    for_parts(backward, c, [&](const BackwardArgs& part) {
      must(cuda::cross_entropy_backward(part, entries.device(), nullptr), what);
    });
  };
  Array other(c.arithmetic, 1);
  other.set(0, 0.5), other.upload();
  if (!c.in_place && chance(0.5)) {
    backward.expected = backward.grad_mean = grad_mean.device();
    run_backward("backward of what is made");
    fresh.download();
    for (int64_t i = 0; i < fresh.count(); ++i) compare_bits("what is made", 0, i, fresh.get(i), 776);
    backward.grad_mean = other.device();
  }
  run_backward("backward");
  for (Array* a : {&loss, &lse, &residual, &mean, &divisor, &ahead_divisor, &ahead_grad, &gradient, &grad_values})
    a->download();
  const double value = normalizer.get(0);
  check_mean(c, p, by_row, loss, normalized ? &value : nullptr, mean.get(0), divisor.get(0));
  compare_bits("divisor ahead", 0, 0, ahead_divisor.get(0), divisor.get(0));
  compare("gradient ahead", 0, 0, ahead_grad.get(0), 0.75 / divisor.get(0), 1e-6 / std::fabs(divisor.get(0)));
  for (int64_t r = 0; r < c.rows; ++r) {
    compare("loss", r, 0, loss.get(r), exact[r].loss, exact[r].loss_bound);
    compare("lse", r, 0, lse.get(r), exact[r].lse, exact[r].lse_bound);
    for (int64_t v = 0; v < c.vocab; ++v)
      compare("grad", r, v, gradient.get(place(backward, r, v)), exact[r].grad[v], exact[r].grad_bound[v]);
    for (const auto& one : by_one_read) {
      compare_bits("loss by one read", r, 0, one->loss.get(r), loss.get(r));
      compare_bits("lse by one read", r, 0, one->lse.get(r), lse.get(r));
      compare_bits("residual by one read", r, 0, one->residual.get(r), residual.get(r));
      for (int64_t v = 0; v < c.vocab; ++v)
        compare_bits("grad by one read", r, v, one->gradient.get(r * one->row_stride() + v),
                     gradient.get(place(backward, r, v)));
    }
    for (int64_t i = p.begin[r]; i < p.end[r]; ++i)
      compare("grad_values", r, i, grad_values.get(i), exact[r].grad_values[i - p.begin[r]],
              exact[r].grad_values_bound[i - p.begin[r]]);
  }
}

std::string form_of(const LossCase& c) {
  CrossEntropyArgs shape{};
  shape.rows = c.rows, shape.vocab = c.vocab, shape.dtype = c.dtype, shape.target.num_classes = c.num_classes;
  shape.row_stride = c.row_stride, shape.strided = c.strided, shape.reads = c.reads;
  shape.planned_rows = c.many_rows ? int64_t(1) << 30 : 0;
  shape.logits = reinterpret_cast<const void*>(c.offset * size_of(c.dtype));
  if (c.rows == 0) return "nothing";
  const cuda::Plan plan = cuda::plan_of(shape, cuda::multiprocessors());
  if (plan.width == 1 && plan.splits > 1) return "threads a row";
  if (plan.width == 1 || cuda::few_classes(shape))
    return c.rows > cuda::kClusterRows ? "a thread a row, a mean in parts"
           : c.rows > cuda::kBlockRows ? "a thread a row, a mean of many"
                                       : "a thread a row";
  if (const cuda::OnePass form = cuda::one_pass_of(shape)) {
    if (form.width == cuda::kWarp) return form.packs <= 4 ? "one pass, a warp's registers" : "one pass, a warp";
    return "one pass, " + (form.cluster == 1 ? "a block" : std::to_string(form.cluster) + " blocks");
  }
  return plan.width == cuda::kWarp ? "warp a row" : plan.splits == 1 ? "block a row" : "blocks a row";
}

Kinds kind_of(const LossCase& c) {
  const std::string form = form_of(c);
  if (c.rows == 0) return {form};
  const auto starts = [&](const char* with) { return form.rfind(with, 0) == 0; };
  const std::string read = starts("a thread") || starts("threads") ? "side by side"
                           : starts("one pass")                    ? "once"
                                                                   : "apart";
  Kinds kinds = {form};
  if (read == "once" && c.layout == Case::kTopK) {
    const bool warp = starts("one pass, a warp");
    const int64_t most = warp ? cuda::kWarp : 4 * cuda::kWarp;
    const auto about = [&](int64_t entries) { return c.width == entries || c.width == entries + 1; };
    if (about(most)) kinds.push_back(warp ? "a warp's most entries" : "a block's most entries");
    if (!warp && about(cuda::kWarp)) kinds.push_back("a warp's entries of a block");
  }
  if (c.row_scale) kinds.push_back("scales of rows, " + read);
  if (c.row_weight) kinds.push_back("weights of rows, " + read);
  if (!c.ends.empty()) kinds.push_back("classes in parts");
  return kinds;
}

}  // namespace
}  // namespace sparse_ce

int main(int argc, char** argv) {
  using namespace sparse_ce;
  return run_seeds(argc, argv, draw_rows, kind_of, run_case);
}
