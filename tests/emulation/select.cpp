// Compares the outputs of select and their gradients with a float64 reference.
#include "rows.h"

#include "../../csrc/cuda/select.cu"
#include "../../csrc/cuda/select_bfloat16.cu"
#include "../../csrc/cuda/select_double.cu"
#include "../../csrc/cuda/select_float.cu"
#include "../../csrc/cuda/select_half.cu"
#include "../../csrc/cuda/cross_entropy.cu"
#include "../../csrc/cuda/one_pass.cu"
#include "../../csrc/cuda/one_pass_bfloat16.cu"
#include "../../csrc/cuda/one_pass_float.cu"
#include "../../csrc/cuda/one_pass_half.cu"

namespace sparse_ce {
namespace {

struct SelectCase : Case {
  bool loss, log_tail, entropy, mean_logit, argmax, collision, rank, row_scale, grad_scale;
  std::vector<int64_t> ends;  // end of the classes of each shard, if classes are sharded
  std::string text() const {
    char out[160];
    std::snprintf(
        out, sizeof(out),
        " loss %d log_tail %d entropy %d mean_logit %d argmax %d collision %d rank %d row_scale %d grad_scale "
        "%d shards",
        loss, log_tail, entropy, mean_logit, argmax, collision, rank, row_scale, grad_scale);
    std::string text = Case::text() + out;
    for (const int64_t end : ends) text += " " + std::to_string(end);
    return text;
  }
};

SelectCase draw_select(bool small) {
  SelectCase c{};
  static_cast<Case&>(c) = draw(small);
  c.shift = 0;  // the loss's test covers the rounding of large logits
  c.logit_size = one_of<double>({1, 5});
  c.loss = chance(0.4), c.log_tail = chance(0.6), c.entropy = chance(0.6), c.mean_logit = chance(0.4);
  c.argmax = chance(0.5), c.collision = chance(0.4), c.rank = chance(0.5);
  c.row_scale = chance(0.3), c.grad_scale = chance(0.3);
  if (!c.loss) c.options.label_smoothing = c.options.z_loss = 0;
  c.ties = c.vocab < 2000 && chance(0.5);  // with more classes, the rounding errors of equal terms exceed the bound
  if (c.ties) {  // also among the entries of one thread
    c.logit_size = 1;
    if (c.layout != Case::kIndex) c.width = 90;
  }
  if (chance(0.4)) {
    for (int64_t shards = below(chance(0.1) ? 40 : 4); shards > 0; --shards) c.ends.push_back(below(c.vocab + 1));
    c.ends.push_back(c.vocab);
    std::sort(c.ends.begin(), c.ends.end());
  }
  return c;
}

// Holds the grad_outputs and the scales of the rows.
struct GradOutputs {
  Array loss, lse, log_probs, log_tail, entropy, mean_logit, collision, scale;

  GradOutputs(const SelectCase& c, const Problem& p)
      : loss(c.arithmetic, c.rows), lse(c.arithmetic, c.rows), log_probs(c.arithmetic, p.indices.count()),
        log_tail(c.arithmetic, c.rows), entropy(c.arithmetic, c.rows), mean_logit(c.arithmetic, c.rows),
        collision(c.arithmetic, c.rows), scale(c.arithmetic, c.rows) {
    for (int64_t r = 0; r < c.rows; ++r) {
      const bool none = chance(0.15);  // a row without any gradient
      for (Array* a : {&loss, &lse, &log_tail, &entropy, &mean_logit, &collision}) a->set(r, none ? 0 : uniform(-1, 1));
      scale.set(r, p.ignored(r) ? NAN : uniform(0.4, 1.3));
      for (int64_t i = p.begin[r]; i < p.end[r]; ++i) log_probs.set(i, none || chance(0.2) ? 0 : uniform(-1, 1));
    }
    for (Array* a : {&loss, &lse, &log_probs, &log_tail, &entropy, &mean_logit, &collision, &scale}) a->upload();
  }
};

struct Exact {
  double loss = 0, loss_size = 0, lse = 0, log_tail = 0, entropy = 0, mean_logit = 0, argmax = -1, collision = 0,
         rank = -1, size = 0, of_scale = 0, scale_size = 0;
  bool counts, invalid = false, scale_known = true;
  std::vector<double> log_probs, grad, bound;
  // These are 0, or the bounds of a row in which a class holds most, which are relative to the other classes.
  double log_prob_bound = 0, log_tail_bound = 0, entropy_bound = 0, collision_bound = 0;
  int64_t most = -1;

  Exact(const SelectCase& c, const Problem& p, const GradOutputs& g, int64_t r)
      : counts(!p.ignored(r)), log_probs(size_t(p.end[r] - p.begin[r])), grad(size_t(c.vocab)), bound(size_t(c.vocab)) {
    if (!counts) return;
    const int64_t n = c.num_classes;
    const double eps = c.arithmetic == DType::kFloat64 ? 2.3e-16 : 1.2e-7, few = 24 * eps,
                 e = c.options.label_smoothing;
    const double row_scale = c.row_scale ? g.scale.get(r) : 1, s = c.options.logit_scale * row_scale;
    std::vector<double> z(n), cap(n), target(n), x(n), sizes(n);
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
    const double log_sum = std::log(sum);
    lse = max + log_sum;
    double mass = 0, grad_sum = 0, absolute = 0;
    bool requested = false;
    for (int64_t i = p.begin[r]; i < p.end[r]; ++i) {
      const int64_t column = int64_t(p.indices.get(i));
      const bool padding = p.padding(i) || column == kIgnore;
      log_probs[i - p.begin[r]] = -7;  // padding_value
      if (padding) continue;
      if (column < 0 || column >= n) {
        invalid = true;
        continue;
      }
      const double w = p.value_of(i);  // an entry whose weight underflows is not padding
      inside[column] = 1;
      if (rank < 0) rank = above(x, s, x[column]);
      log_probs[i - p.begin[r]] = z[column] - lse;  // NaN if there is no distribution
      requested = requested || g.log_probs.get(i) != 0;
      grad_sum += g.log_probs.get(i);
      target[column] -= g.log_probs.get(i);
      absolute += std::fabs(g.log_probs.get(i));
      sizes[column] += std::fabs(g.log_probs.get(i));
      if (c.loss) {
        mass += w * p.weight_of(column);
        absolute += std::fabs(w * p.weight_of(column) * g.loss.get(r));
        sizes[column] += std::fabs(w * p.weight_of(column) * g.loss.get(r));
        target[column] += (1 - e) * g.loss.get(r) * w * p.weight_of(column);
      }
    }
    const bool dead = max == -INFINITY;  // there is no distribution
    double tail_max = -INFINITY, tail = 0;
    for (int64_t v = 0; v < n; ++v)
      if (!inside[v]) tail_max = std::fmax(tail_max, z[v]);
    for (int64_t v = 0; v < n; ++v)
      if (!inside[v] && tail_max > -INFINITY) tail += std::exp(z[v] - tail_max);
    log_tail = dead ? NAN : tail_max == -INFINITY ? -INFINITY : tail_max + std::log(tail) - lse;
    for (int64_t v = 0; v < n; ++v) {
      const double q = std::exp(z[v] - lse);
      if (q > 0) entropy -= q * (z[v] - lse);
      collision += q * q;
      weights += p.weight_of(v);
    }
    of_loss(c, p, r, z, log_sum);
    collision = std::log(collision);
    if (dead) lse = -INFINITY, entropy = NAN, loss = NAN, collision = NAN;
    const Leading l(c, x, s, inside);
    const bool leads = c.options.softcap == 0 && std::isfinite(max) && !invalid && l.rest < 0.6L;
    if (leads) {
      most = int64_t(l.most), log_prob_bound = double(l.log_total_error()) + 1e-37;
      for (int64_t i = p.begin[r]; i < p.end[r]; ++i)
        if (int64_t(p.indices.get(i)) == most && !p.padding(i)) log_probs[i - p.begin[r]] = -double(l.log_total());
      entropy = double(l.entropy()), entropy_bound = double(l.entropy_error()) + 1e-37;
      collision = double(l.collision()), collision_bound = double(l.collision_error()) + 1e-37;
      if (!l.inside_most) log_tail = -double(std::log1p(l.odds()));
      if (!l.inside_most) log_tail_bound = double(l.odds_error()) + 8 * l.half * std::fabs(log_tail) + 1e-37;
    }
    const double g_loss = c.loss ? g.loss.get(r) : 0, g_lse = c.has_grad_lse ? g.lse.get(r) : 0;
    const double g_tail = c.log_tail && tail_max > -INFINITY ? g.log_tail.get(r) : 0;
    const double g_entropy = c.entropy ? g.entropy.get(r) : 0, g_mean = c.mean_logit ? g.mean_logit.get(r) : 0;
    const double g_collision = c.collision ? 2 * g.collision.get(r) : 0;
    if (!requested && g_loss == 0 && g_lse == 0 && (!c.log_tail || g.log_tail.get(r) == 0) && g_entropy == 0 &&
        g_mean == 0 && g_collision == 0)
      return;
    const double a =
        g_loss * ((1 - e) * mass + e / double(n) * weights + 2 * c.options.z_loss * lse) + g_lse - grad_sum - g_tail;
    const double all = std::fabs(a) + absolute + std::fabs(g_tail) + std::fabs(g_collision) +
                       std::fabs(g_entropy) * (std::fabs(entropy) + 1) +
                       std::fabs(g_loss) * (2 * c.options.z_loss * std::fabs(lse) + e / double(n) * weights);
    const double ulp = c.dtype == DType::kFloat16 ? 0x1p-11 : c.dtype == DType::kBFloat16 ? 0x1p-8 : eps;
    for (int64_t v = 0; v < n; ++v) {
      const double log_q = z[v] - lse, q = std::exp(log_q);
      const double square = g_collision * q * q * std::exp(-collision);
      double dz = q > 0 ? q * (a - g_collision - g_entropy * (log_q + entropy)) + square : 0;
      dz += g_mean / double(n) - g_loss * e / double(n) * p.weight_of(v) - target[v];
      if (!inside[v] && q > 0) dz += g_tail * std::exp(z[v] - lse - log_tail);
      const double slope = s * cap[v];
      grad[v] = invalid || dead ? NAN : dz * slope;
      const double parts =
          (q > 0 ? (all * q + std::fabs(square)) * (1 + std::fabs(log_q) + size) : 0) + std::fabs(g_mean) / double(n) +
          std::fabs(g_loss) * e / double(n) * p.weight_of(v) + (target[v] != 0 ? absolute : 0) +
          (q > 0 && !inside[v] ? std::fabs(g_tail) * std::exp(z[v] - lse - log_tail) * (2 + size + std::fabs(log_tail))
                               : 0);
      bound[v] =
          ulp * std::fabs(grad[v]) + few * parts * (std::fabs(slope) + 1) + 6e-8 * (c.dtype == DType::kFloat16) + 1e-37;
      const double of_x = c.options.logit_scale * cap[v] * x[v];
      of_scale += dz == 0 ? 0 : dz * of_x;
      scale_known = scale_known && !(std::isinf(x[v]) && c.options.softcap != 0);  // 0 * inf, or 0 by rounding
      const double common =
          c.options.softcap ? 0 : c.options.logit_scale / s * (lse - std::log(double(n)));  // see select.h
      if (std::isfinite(of_x)) scale_size += parts * (std::fabs(of_x) + std::fabs(common)) + std::fabs(dz * of_x);
    }
    if (invalid || dead) of_scale = NAN;
    if (!leads) return;
    long double of_all = 0, others = 0, all_size = 0, others_size = 0;  // of the entries' weights
    for (size_t v = 0; v < size_t(n); ++v) {
      of_all += target[v], all_size += sizes[v];
      if (v != l.most) others += target[v], others_size += sizes[v];
    }
    const double o = p.weight_of(most), per_class = g_loss * e / double(n), of_z = g_loss * 2 * c.options.z_loss * lse;
    const long double of_row = per_class * (long double)weights + of_z + g_lse, q = 1 / l.total();
    const long double row_size = std::fabs(per_class) * weights + std::fabs(of_z) + std::fabs(g_lse);
    const long double of_tail = l.inside_most ? -q : q * l.odds(), of_entropy = q * l.spread / l.total();
    const long double of_collision = q * (l.rest - l.squares) / (1 + l.squares);
    const long double dz = others + of_row - per_class * o + g_mean / double(n) - (of_all + of_row) * l.rest * q +
                           g_tail * of_tail - g_entropy * of_entropy + g_collision * of_collision;
    const long double tail_error = l.inside_most ? l.error : l.odds_error();
    const long double error =
        (all_size + row_size) * (l.error + 16 * l.half * l.rest) +
        16 * l.half * (others_size + row_size + std::fabs(per_class * o) + std::fabs(g_mean) / double(n)) +
        std::fabs(g_tail) * (tail_error + 16 * l.half * std::fabs(of_tail)) +
        std::fabs(g_entropy) * (l.entropy_error() + l.log_total_error() + 8 * l.half * (l.entropy() + l.log_total())) +
        std::fabs(g_collision) *
            (l.collision_error() + l.log_total_error() + 8 * l.half * (l.log_total() + std::fabs(l.collision())));
    grad[l.most] = double(dz * s);
    bound[l.most] =
        ulp * std::fabs(grad[l.most]) + double(error) * std::fabs(s) + 6e-8 * (c.dtype == DType::kFloat16) + 1e-37;
  }

 private:
  // Holds what a row has besides the class that leads it, with bounds of its rounding errors.
  struct Leading {
    size_t most;
    bool inside_most;
    long double rest = 0, squares = 0, spread = 0, across = 0;  // across: of the classes on the other side of S
    long double error = 0, spread_error = 0, across_error = 0;
    double half;  // a unit in the last place

    // `inside` are the entries' classes. The error of an exponential grows with its distance from the largest.
    Leading(const SelectCase& c, const std::vector<double>& x, double scale, const std::vector<char>& inside)
        : half(c.arithmetic == DType::kFloat64 ? 0x1p-53 : 0x1p-24) {
      const auto z = [&](size_t v) { return (long double)x[v] * scale; };
      most = 0;
      for (size_t v = 1; v < x.size(); ++v)
        if (z(v) > z(most)) most = v;
      inside_most = inside[most];
      for (size_t v = 0; v < x.size(); ++v) {
        const long double below = z(v) - z(most), power = v == most ? 0 : std::exp(below);
        if (power == 0) continue;
        const long double of_scale = scale == 1 ? 0 : 2 * (std::fabs(z(v)) + std::fabs(z(most)));
        const long double of_power = power * (4 * std::fabs(below) + of_scale + 16) * half + 2e-38L;
        rest += power, squares += power * power, spread -= power * below;
        error += of_power, spread_error += of_power * std::fabs(below) + power * of_scale * half;
        if (inside[v] != inside_most) across += power, across_error += of_power;
      }
    }
    long double total() const { return 1 + rest; }
    long double log_total() const { return std::log1p(rest); }
    long double log_total_error() const { return error / total() + 8 * half * log_total(); }
    long double odds() const { return across / (total() - across); }  // of the other side of S
    long double odds_error() const {
      return across_error + odds() * (error + 32 * half + (odds() > 0 ? 8 * half * std::fabs(std::log(odds())) : 0));
    }
    long double entropy() const { return log_total() + spread / total(); }
    long double entropy_error() const { return 2 * (error * (1 + spread) + spread_error) + 16 * half * entropy(); }
    long double collision() const { return std::log1p(squares) - 2 * log_total(); }
    long double collision_error() const { return 4 * error + 16 * half * std::fabs(collision()); }
  };

  static double above(const std::vector<double>& x, double scale, double of_class) {
    double count = 0;
    for (double each : x) count += scale > 0 ? each > of_class : each < of_class;
    return count;
  }

  // Adds terms and their sizes. Terms of a class of weight 0 are 0 even at -inf.
  void of_loss(const SelectCase& c, const Problem& p, int64_t r, const std::vector<double>& z, double log_sum) {
    const double e = c.options.label_smoothing, n = double(c.num_classes), max = lse - log_sum;
    const auto add = [&](double w, int64_t column) {
      if (w == 0) return;
      loss += w * (log_sum - (z[size_t(column)] - max));
      loss_size += std::fabs(w);
    };
    for (int64_t i = p.begin[r]; i < p.end[r]; ++i) {
      const int64_t column = int64_t(p.indices.get(i));
      if (p.padding(i) || column == kIgnore || column < 0 || column >= c.num_classes) continue;
      add((1 - e) * p.value_of(i) * p.weight_of(column), column);
    }
    for (int64_t v = 0; e != 0 && v < c.num_classes; ++v) add(e / n * p.weight_of(v), v);
    loss += c.options.z_loss * lse * lse;
    loss_size = loss_size * (2 * size + std::fabs(lse) + 1) + c.options.z_loss * (lse * lse + 1) + 1e-3;
  }
};

// Restricts the arguments to the classes of shard `s`. Backward then also restricts its gradients.
template <typename args_t>
args_t of_shard(args_t args, const SelectCase& c, size_t s) {
  args.first_class = s == 0 ? 0 : c.ends[s - 1];
  args.vocab = c.ends[s];
  args.logits = advance(args.logits, args.dtype, args.first_class);
  return args;
}

void run_forward(const SelectArgs& args) {
  Array space(DType::kInt32, int64_t(cuda::workspace_of(args) + 3) / 4);
  must(cuda::select_forward(args, space.device(), nullptr), "forward");
}

void run_forward_of_shards(const SelectArgs& args, const SelectCase& c, const Problem& p) {
  const int64_t numbers = ShardStats<float>::numbers(args.outputs, args.needs_smoothing());
  const auto shards = int64_t(c.ends.size());
  Array gathered(c.arithmetic, shards * c.rows * numbers), chosen(c.arithmetic, p.indices.count());
  Array ranked(c.arithmetic, c.rows);
  for (int64_t r = 0; r < c.rows; ++r) {
    const int64_t column = args.ranked_class<double>(r);
    ranked.set(r, column < 0 ? 0 : p.logits.get(r * c.row_stride + column));
  }
  ranked.upload();
  for (int64_t i = 0; i < gathered.count(); ++i) gathered.set(i, 55);
  for (int64_t i = 0; i < chosen.count(); ++i) chosen.set(i, 0);
  gathered.upload(), chosen.upload();
  for (int64_t s = 0; s < shards; ++s) {
    SelectArgs part = of_shard(args, c, size_t(s));
    for (void** out :
         {&part.loss, &part.lse, &part.lse_residual, &part.log_probs, &part.log_tail, &part.entropy, &part.mean_logit})
      *out = nullptr;
    part.argmax = part.rank = nullptr, part.collision = nullptr, part.ranked = ranked.device();
    part.statistics = advance(gathered.device(), c.arithmetic, s * c.rows * numbers);
    part.chosen = chosen.device();
    run_forward(part);
  }
  SelectMergeArgs merge{};
  static_cast<SelectArgs&>(merge) = args;
  merge.dtype = c.arithmetic;
  merge.gathered = gathered.device(), merge.logits_of_entries = chosen.device(), merge.shards = shards;
  must(cuda::select_merge(merge, nullptr), "merge");
}

void run_backward(const SelectBackwardArgs& args) {
  Array entries(DType::kFloat64, int64_t(cuda::workspace_of(args) + 7) / 8);
  must(cuda::select_backward(args, entries.device(), nullptr), "backward");
}

// `of_scale` receives the sum over the shards.
void run_backward_of_shards(const SelectBackwardArgs& args, const SelectCase& c, Array& of_scale) {
  std::vector<double> sums(size_t(c.rows), 0);
  for (size_t s = 0; s < c.ends.size(); ++s) {
    SelectBackwardArgs part = of_shard(args, c, s);
    part.grad_logits = advance(args.grad_logits, args.dtype, part.first_class);
    run_backward(part);
    of_scale.download();
    for (int64_t r = 0; r < c.rows; ++r) sums[size_t(r)] += of_scale.get(r);
  }
  for (int64_t r = 0; r < c.rows; ++r) of_scale.set(r, sums[size_t(r)]);
  of_scale.upload();
}

void run_select(const SelectCase& c) {
  Problem p(c);
  const GradOutputs g(c, p);
  Array loss(c.arithmetic, c.rows), lse(c.arithmetic, c.rows), residual(c.arithmetic, c.rows);
  Array log_tail(c.arithmetic, c.rows), entropy(c.arithmetic, c.rows), mean_logit(c.arithmetic, c.rows);
  Array collision(c.arithmetic, c.rows), rank(DType::kInt64, c.rows);
  Array argmax(DType::kInt64, c.rows), log_probs(c.arithmetic, p.indices.count()), of_scale(c.arithmetic, c.rows);
  for (Array* a :
       {&loss, &lse, &residual, &log_tail, &entropy, &mean_logit, &argmax, &collision, &rank, &log_probs, &of_scale}) {
    for (int64_t i = 0; i < a->count(); ++i) a->set(i, 77);
    a->upload();
  }
  SelectArgs forward{};
  p.fill(forward);
  forward.outputs = {c.loss, true, c.log_tail, c.entropy, c.mean_logit, c.argmax, c.collision, c.rank};
  forward.row_scale = c.row_scale ? g.scale.device() : nullptr, forward.row_scale_stride = 1;
  forward.loss = c.loss ? loss.device() : nullptr;
  forward.lse = lse.device(), forward.lse_residual = residual.device(), forward.log_probs = log_probs.device();
  forward.log_tail = c.log_tail ? log_tail.device() : nullptr, forward.entropy = c.entropy ? entropy.device() : nullptr;
  forward.mean_logit = c.mean_logit ? mean_logit.device() : nullptr;
  forward.argmax = c.argmax ? static_cast<int64_t*>(argmax.device()) : nullptr;
  forward.collision = c.collision ? collision.device() : nullptr;
  forward.rank = c.rank ? static_cast<int64_t*>(rank.device()) : nullptr;
  forward.padding_value = -7;
  c.ends.empty() ? run_forward(forward) : run_forward_of_shards(forward, c, p);

  SelectBackwardArgs backward{};
  p.fill(backward);
  backward.row_scale = forward.row_scale, backward.row_scale_stride = 1;
  backward.lse = lse.device(), backward.lse_residual = residual.device();
  backward.grad_loss = c.loss ? g.loss.device() : nullptr, backward.grad_loss_stride = 1;
  backward.grad_lse = c.has_grad_lse ? g.lse.device() : nullptr, backward.grad_lse_stride = 1;
  backward.grad_log_probs = g.log_probs.device();
  if (c.log_tail) backward.grad_log_tail = {g.log_tail.device(), 1}, backward.log_tail = log_tail.device();
  if (c.entropy) backward.grad_entropy = {g.entropy.device(), 1}, backward.entropy = entropy.device();
  if (c.mean_logit) backward.grad_mean_logit = {g.mean_logit.device(), 1};
  if (c.collision) backward.grad_collision = {g.collision.device(), 1}, backward.collision = collision.device();
  backward.grad_scale = c.grad_scale ? of_scale.device() : nullptr;
  std::vector<Exact> exact;
  for (int64_t r = 0; r < c.rows; ++r) exact.emplace_back(c, p, g, r);
  Array fresh(c.dtype, c.rows * c.vocab, c.in_place ? 0 : below(3) * 4);
  for (int64_t i = 0; i < fresh.count(); ++i) fresh.set(i, 777);
  fresh.upload();
  Array& gradient = c.in_place ? p.logits : fresh;
  backward.grad_logits = gradient.device();
  backward.grad_row_stride = c.in_place ? c.row_stride : c.vocab;
  c.ends.empty() ? run_backward(backward) : run_backward_of_shards(backward, c, of_scale);

  for (Array* a :
       {&loss, &lse, &log_tail, &entropy, &mean_logit, &argmax, &collision, &rank, &log_probs, &of_scale, &gradient})
    a->download();
  const double few = 24 * (c.arithmetic == DType::kFloat64 ? 2.3e-16 : 1.2e-7);
  for (int64_t r = 0; r < c.rows; ++r) {
    const Exact& x = exact[r];
    const double bound = few * (2 * x.size + std::fabs(x.lse) + 2);
    const auto of_row = [&](double value) { return !x.counts ? 0 : x.invalid ? NAN : value; };
    compare("lse", r, 0, lse.get(r), of_row(x.lse), bound);
    if (c.loss)
      compare("loss", r, 0, loss.get(r), of_row(x.loss), few * x.loss_size * (c.options.label_smoothing != 0 ? 8 : 1));
    const auto either = [](double tight, double other) { return tight != 0 ? tight : other; };
    if (c.log_tail) compare("log_tail", r, 0, log_tail.get(r), of_row(x.log_tail), either(x.log_tail_bound, bound));
    if (c.entropy)
      compare("entropy", r, 0, entropy.get(r), of_row(x.entropy), either(x.entropy_bound, bound * (1 + x.entropy)));
    if (c.mean_logit) compare("mean_logit", r, 0, mean_logit.get(r), of_row(x.mean_logit), 4 * bound);
    if (c.argmax && c.options.softcap == 0) compare("argmax", r, 0, argmax.get(r), x.counts ? x.argmax : -1, 0);
    if (c.collision)
      compare("collision", r, 0, collision.get(r), of_row(x.collision), either(x.collision_bound, 2 * bound));
    if (c.rank) compare("rank", r, 0, rank.get(r), x.counts && !x.invalid ? x.rank : -1, 0);
    for (int64_t i = p.begin[r]; i < p.end[r]; ++i)
      compare("log_probs", r, i, log_probs.get(i), of_row(x.log_probs[i - p.begin[r]]),
              int64_t(p.indices.get(i)) == x.most ? x.log_prob_bound : bound);
    for (int64_t v = 0; v < c.vocab; ++v)
      compare("grad", r, v, gradient.get(r * backward.grad_row_stride + v), x.grad[v], x.bound[v]);
    if (c.grad_scale && x.scale_known)
      compare("of_scale", r, 0, of_scale.get(r), x.of_scale, few * x.scale_size + 1e-30);
  }
}

std::string kind_of(const SelectCase& c) {
  CrossEntropyArgs shape{};
  shape.rows = c.rows, shape.vocab = c.vocab, shape.dtype = c.dtype, shape.target.num_classes = c.num_classes;
  if (c.rows == 0) return "nothing";
  if (!c.ends.empty()) return "shards";
  const cuda::Plan plan = cuda::plan_of(shape, cuda::multiprocessors());
  return plan.width == cuda::kWarp ? "warp a row" : plan.splits == 1 ? "block a row" : "blocks a row";
}

}  // namespace
}  // namespace sparse_ce

int main(int argc, char** argv) {
  using namespace sparse_ce;
  return run_seeds(argc, argv, draw_select, kind_of, run_select);
}
