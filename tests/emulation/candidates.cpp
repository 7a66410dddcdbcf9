// Compares the candidate logits of a head and their gradients with a float64 reference.
#include "harness.h"

#include "../../csrc/cuda/candidates.cu"

#include <algorithm>

namespace sparse_ce {
namespace {

struct Case {
  enum Layout { kIndex, kTopk, kJagged, kRanges } layout;
  DType input_dtype, weight_dtype, bias_dtype, indices_dtype, values_dtype, offsets_dtype;
  int64_t rows, k, vocab, width, input_gap, weight_gap, input_offset, weight_offset, max_blocks;
  bool bias, values, logprobs, mask, input_grad, weight_grad, sparse;
  LossOptions options;
  std::string text() const {
    char out[256];
    std::snprintf(out, sizeof(out),
                  "layout %d dtypes %d %d rows %ld k %ld vocab %ld width %ld gaps %ld %ld offsets %ld %ld bias %d "
                  "values %d logprobs %d mask %d grads %d %d sparse %d softcap %g max_blocks %ld",
                  int(layout), int(input_dtype), int(weight_dtype), long(rows), long(k), long(vocab), long(width),
                  long(input_gap), long(weight_gap), long(input_offset), long(weight_offset), bias, values, logprobs,
                  mask, input_grad, weight_grad, sparse, options.softcap, long(max_blocks));
    return out;
  }
};

Case draw(bool small) {
  Case c{};
  c.layout = Case::Layout(below(4));
  c.input_dtype = one_of<DType>({DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16});
  const auto other = [&] { return size_of(c.input_dtype) == 2 && chance(0.4) ? DType::kFloat32 : c.input_dtype; };
  c.weight_dtype = other(), c.bias_dtype = other();
  c.indices_dtype = chance(0.5) ? DType::kInt64 : DType::kInt32;
  c.offsets_dtype = chance(0.5) ? DType::kInt64 : DType::kInt32;
  c.values_dtype = one_of<DType>({DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16});
  c.rows = 1 + below(small ? 8 : 30), c.vocab = 1 + below(chance(0.3) ? 5 : 200);
  c.k = c.layout == Case::kIndex ? 1 : below(chance(0.2) ? 80 : 12);
  // Packs have 2, 4 or 8 elements; a span has 32 packs.
  c.width = chance(0.5) ? 8 * (1 + below(small ? 12 : 80)) : 1 + below(small ? 40 : 600);
  // Sometimes rows begin at a pack's boundary but do not end at one.
  for (int64_t* gap : {&c.input_gap, &c.weight_gap})
    *gap = chance(0.5) ? 0 : one_of<int64_t>({8, below(5), 8 - c.width % 8});
  c.input_offset = chance(0.6) ? 0 : below(9), c.weight_offset = chance(0.6) ? 0 : below(9);
  c.bias = chance(0.5), c.mask = chance(0.3), c.values = c.layout != Case::kIndex && chance(0.5);
  c.logprobs = c.values && chance(0.5);
  c.input_grad = chance(0.8), c.weight_grad = chance(0.7), c.sparse = chance(0.4);
  if (chance(0.4)) c.options.logit_scale = uniform(-1.5, 1.5);
  if (chance(0.4)) c.options.softcap = uniform(0.5, 6);
  c.max_blocks = chance(0.5) ? 0 : 1 + below(3);
  return c;
}

std::string kind_of(const Case& c) {
  const int64_t pack = 16 / size_of(c.weight_dtype);
  const auto fit = [&](int64_t number) { return number % pack == 0; };
  const bool packs = fit(c.width + c.weight_gap) && fit(c.weight_offset) && c.width >= pack;
  return packs ? "weights by packs" : "weights by singles";
}

constexpr int64_t kIgnore = -100;

// Describes an entry for the reference: its row, or -1 without one, and its id, or the reason why it has none.
struct EntryOf {
  int64_t row, column;
};

struct Problem {
  const Case& c;
  std::vector<int64_t> begin, end;
  int64_t entries;
  Array input, weight, bias, grad, indices, values, offsets;
  Array mask;
  std::vector<EntryOf> each;

  explicit Problem(const Case& c)
      : c(c), entries(lay_out()), input(c.input_dtype, c.rows * (c.width + c.input_gap) - c.input_gap, c.input_offset),
        weight(c.weight_dtype, c.vocab * (c.width + c.weight_gap) - c.weight_gap, c.weight_offset),
        bias(c.bias_dtype, c.vocab),
        grad(c.input_dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32, entries),
        indices(c.indices_dtype, entries), values(c.values_dtype, entries),
        offsets(c.offsets_dtype, c.layout == Case::kRanges ? 2 * c.rows : c.rows + 1), mask(DType::kUInt8, c.rows) {
    // The gaps between rows belong to no row.
    for (int64_t i = 0; i < input.count(); ++i)
      input.set(i, i % (c.width + c.input_gap) < c.width ? uniform(-1, 1) : NAN);
    for (int64_t i = 0; i < weight.count(); ++i)
      weight.set(i, i % (c.width + c.weight_gap) < c.width ? uniform(-1, 1) : NAN);
    for (int64_t i = 0; i < bias.count(); ++i) bias.set(i, uniform(-2, 2));
    each.assign(size_t(entries), {-1, TargetView::kPadding});
    for (int64_t i = 0; i < entries; ++i) fill(i);
    std::vector<bool> reads(size_t(c.rows), false);
    for (int64_t r = 0; r < c.rows; ++r) {
      mask.set(r, !c.mask || chance(0.7));
      for (int64_t i = begin[size_t(r)]; i < end[size_t(r)]; ++i) {
        EntryOf& entry = each[size_t(i)];
        entry = {r, mask.get(r) ? column_of(i) : TargetView::kPadding};
        if (entry.column >= 0) reads[size_t(r)] = true;
      }
      if (c.layout != Case::kRanges) continue;
      offsets.set(2 * r, double(begin[size_t(r)])), offsets.set(2 * r + 1, double(end[size_t(r)]));
    }
    if (c.layout != Case::kRanges)
      for (int64_t r = 0; r <= c.rows; ++r) offsets.set(r, double(r < c.rows ? begin[size_t(r)] : entries));
    for (int64_t r = 0; r < c.rows; ++r)  // the contents of such a row must not matter
      for (int64_t d = 0; !reads[size_t(r)] && d < c.width; ++d) input.set(r * (c.width + c.input_gap) + d, NAN);
    for (Array* a : {&input, &weight, &bias, &grad, &indices, &values, &offsets, &mask}) a->upload();
  }

  // Returns the number of entries.
  int64_t lay_out() {
    int64_t at = 0;
    begin.resize(size_t(c.rows)), end.resize(size_t(c.rows));
    std::vector<int64_t> order;
    for (int64_t r = 0; r < c.rows; ++r) order.push_back(r);
    for (int64_t r = c.rows - 1; c.layout == Case::kRanges && r > 0; --r)
      std::swap(order[size_t(r)], order[size_t(below(r + 1))]);
    const bool varies = c.layout == Case::kJagged || c.layout == Case::kRanges;
    for (const int64_t r : order) {
      if (c.layout == Case::kRanges) at += below(3);  // entries that belong to no row
      begin[size_t(r)] = at;
      at += varies ? below(2 * c.k + 1) : c.k;
      end[size_t(r)] = at;
    }
    return at;
  }

  void fill(int64_t i) {
    const double out = chance(0.5) ? double(c.vocab + below(9)) : -1;
    indices.set(i, chance(0.1) ? double(kIgnore) : chance(0.04) ? out : double(below(c.vocab)));
    const double padding = c.logprobs ? -INFINITY : 0;
    values.set(i, chance(0.2) ? padding : c.logprobs && chance(0.3) ? -300 : uniform(0.1, 2));
    if (c.values && values.get(i) == padding && chance(0.5)) indices.set(i, double(c.vocab + 7));
    grad.set(i, chance(0.2) ? 0 : uniform(-2, 2));
  }

  int64_t column_of(int64_t i) const {
    const auto id = int64_t(indices.get(i));
    const bool padding = id == kIgnore || (c.values && values.get(i) == (c.logprobs ? -INFINITY : 0));
    return padding ? TargetView::kPadding : id < 0 || id >= c.vocab ? TargetView::kOutside : id;
  }

  CandidateArgs args() const {
    CandidateArgs args{};
    args.input = input.device(), args.weight = weight.device(), args.bias = c.bias ? bias.device() : nullptr;
    args.input_dtype = c.input_dtype, args.weight_dtype = c.weight_dtype, args.bias_dtype = c.bias_dtype;
    args.width = c.width, args.input_stride = c.width + c.input_gap, args.weight_stride = c.width + c.weight_gap;
    args.options = c.options, args.max_blocks = c.max_blocks;
    TargetView& target = args.target;
    target.indices = indices.device(), target.values = c.values ? values.device() : nullptr;
    const bool jagged = c.layout == Case::kJagged || c.layout == Case::kRanges;
    target.offsets = jagged ? offsets.device() : nullptr;
    target.offsets_step = c.layout == Case::kRanges ? 2 : 1;
    target.row_mask = c.mask ? static_cast<const bool*>(mask.device()) : nullptr;
    target.indices_dtype = c.indices_dtype, target.values_dtype = c.values_dtype;
    target.offsets_dtype = c.offsets_dtype;
    target.rows = c.rows, target.entries = entries, target.width = jagged ? 0 : c.k;
    target.num_classes = c.vocab, target.ignore_index = kIgnore, target.logprobs = c.logprobs;
    return args;
  }
  double x(int64_t r, int64_t d) const { return input.get(r * (c.width + c.input_gap) + d); }
  double w(int64_t id, int64_t d) const { return weight.get(id * (c.width + c.weight_gap) + d); }
};

struct Bound {
  double ulp, eps, least;  // of the storage type, of the arithmetic, smallest number
  explicit Bound(DType dtype, DType arithmetic)
      : ulp(dtype == DType::kFloat16    ? 0x1p-11
            : dtype == DType::kBFloat16 ? 0x1p-8
                                        : 0),
        eps(arithmetic == DType::kFloat64 ? 1e-15 : 5e-7), least(dtype == DType::kFloat16 ? 6e-8 : 1e-37) {}
  double of(double exact, double absolute) const { return ulp * std::fabs(exact) + eps * absolute + least; }
};

// Holds the entries of an id, sorted as in the op.
struct Sorted {
  std::vector<int64_t> order, slots, distinct;
  Sorted(const Array& ids, int64_t vocab) {
    for (int64_t q = 0; q < ids.count(); ++q) order.push_back(q);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return ids.get(a) < ids.get(b); });
    for (const int64_t i : order) {
      const auto id = int64_t(ids.get(i));
      if (distinct.empty() || distinct.back() != id) distinct.push_back(id);
      slots.push_back(int64_t(distinct.size()) - 1);
    }
    if (!distinct.empty() && distinct.back() == vocab) distinct.pop_back();
  }
};

void run_case(const Case& c) {
  const Problem p(c);
  const DType arithmetic = c.input_dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const LogitTransform<double> transform(c.options);
  Array logits(arithmetic, p.entries), grad_input(c.input_dtype, c.rows * c.width), d(arithmetic, p.entries);
  Array ids(DType::kInt64, p.entries + 1), rows(DType::kInt64, p.entries);
  for (int64_t i = 0; i < p.entries; ++i) logits.set(i, -INFINITY), d.set(i, NAN), rows.set(i, 777);
  for (int64_t i = 0; i <= p.entries; ++i) ids.set(i, double(c.vocab));
  for (int64_t i = 0; i < grad_input.count(); ++i) grad_input.set(i, 777);
  for (Array* a : {&logits, &grad_input, &d, &ids, &rows}) a->upload();

  CandidateForwardArgs forward{};
  static_cast<CandidateArgs&>(forward) = p.args();
  forward.logits = logits.device();
  must(cuda::candidate_logits(forward, nullptr), "candidate_logits");
  CandidateBackwardArgs backward{};
  static_cast<CandidateArgs&>(backward) = p.args();
  backward.grad = p.grad.device(), backward.logits = c.options.softcap > 0 ? logits.device() : nullptr;
  backward.grad_input = c.input_grad ? grad_input.device() : nullptr;
  backward.grad_logits = d.device(), backward.ids = static_cast<int64_t*>(ids.device());
  backward.rows = static_cast<int64_t*>(rows.device());
  must(cuda::candidate_logits_backward(backward, nullptr), "candidate_logits_backward");
  for (Array* a : {&logits, &grad_input, &ids}) a->download();

  const Bound of_logits(arithmetic, arithmetic), of_input(c.input_dtype, arithmetic);
  std::vector<double> exact_d(size_t(p.entries), 0);
  for (int64_t i = 0; i < p.entries; ++i) {
    const auto [r, id] = p.each[size_t(i)];
    if (id < 0) {
      compare("logit", r, i, logits.get(i), id == TargetView::kPadding ? -INFINITY : NAN, 0);
      compare("id", r, i, ids.get(i), double(c.vocab), 0);
      continue;
    }
    long double dot = c.bias ? p.bias.get(id) : 0, absolute = std::fabs(dot);
    for (int64_t e = 0; e < c.width; ++e) dot += p.x(r, e) * p.w(id, e), absolute += std::fabs(p.x(r, e) * p.w(id, e));
    const double z = transform(double(dot)), scale = std::fabs(c.options.logit_scale);
    compare("logit", r, i, logits.get(i), z, of_logits.of(z, scale * double(absolute) + std::fabs(z)));
    exact_d[size_t(i)] = p.grad.get(i) * transform.slope(logits.get(i));  // from the rounded logit
    compare("id", r, i, ids.get(i), p.grad.get(i) == 0 ? double(c.vocab) : double(id), 0);
  }
  for (int64_t r = 0; c.input_grad && r < c.rows; ++r) {
    for (int64_t e = 0; e < c.width; ++e) {
      long double exact = 0, absolute = 0;
      for (int64_t i = p.begin[size_t(r)]; i < p.end[size_t(r)]; ++i) {
        if (p.each[size_t(i)].column < 0) continue;
        const double term = exact_d[size_t(i)] * p.w(p.each[size_t(i)].column, e);
        exact += term, absolute += 2 * std::fabs(p.grad.get(i) * c.options.logit_scale);
      }
      compare("input's gradient", r, e, grad_input.get(r * c.width + e), double(exact),
              absolute == 0 ? 0 : of_input.of(double(exact), double(absolute)));
    }
  }

  const Sorted by_id(ids, c.vocab);
  const int64_t slots = c.sparse ? int64_t(by_id.distinct.size()) : c.vocab;
  Array sorted(DType::kInt64, p.entries + 1), order(DType::kInt64, p.entries + 1), slot(DType::kInt64, p.entries + 1);
  Array grad_weight(c.weight_dtype, slots * c.width), grad_bias(c.bias_dtype, c.vocab);
  for (int64_t q = 0; q <= p.entries; ++q) {
    sorted.set(q, ids.get(by_id.order[size_t(q)]));
    order.set(q, double(by_id.order[size_t(q)])), slot.set(q, double(by_id.slots[size_t(q)]));
  }
  for (int64_t i = 0; i < grad_weight.count(); ++i) grad_weight.set(i, c.sparse ? 777 : 0);
  for (int64_t i = 0; i < c.vocab; ++i) grad_bias.set(i, 0);
  for (Array* a : {&sorted, &order, &slot, &grad_weight, &grad_bias}) a->upload();
  CandidateWeightArgs args{};
  args.input = p.input.device(), args.input_stride = c.width + c.input_gap, args.width = c.width;
  args.input_dtype = c.input_dtype, args.weight_dtype = c.weight_dtype, args.bias_dtype = c.bias_dtype;
  args.entries = p.entries, args.vocab = c.vocab, args.max_blocks = c.max_blocks;
  args.ids = static_cast<const int64_t*>(sorted.device()), args.order = static_cast<const int64_t*>(order.device());
  args.slots = c.sparse ? static_cast<const int64_t*>(slot.device()) : nullptr;
  args.rows = static_cast<const int64_t*>(rows.device()), args.grad_logits = d.device();
  args.grad_weight = c.weight_grad ? grad_weight.device() : nullptr, args.grad_bias = grad_bias.device();
  must(cuda::candidate_weight_gradient(args, nullptr), "candidate_weight_gradient");
  grad_weight.download(), grad_bias.download();

  const Bound of_weight(c.weight_dtype, arithmetic), of_bias(c.bias_dtype, arithmetic);
  for (int64_t v = 0; v < c.vocab; ++v) {
    const auto at = std::lower_bound(by_id.distinct.begin(), by_id.distinct.end(), v);
    const bool there = at != by_id.distinct.end() && *at == v;
    const int64_t row = c.sparse ? at - by_id.distinct.begin() : v;
    for (int64_t e = -1; e < c.width; ++e) {  // -1 is the bias
      if (e >= 0 && (!c.weight_grad || (c.sparse && !there))) break;
      long double exact = 0, absolute = 0;
      for (int64_t i = 0; i < p.entries; ++i) {
        if (p.each[size_t(i)].column != v || p.grad.get(i) == 0) continue;
        exact += exact_d[size_t(i)] * (e < 0 ? 1 : p.x(p.each[size_t(i)].row, e));
        absolute += 2 * std::fabs(p.grad.get(i) * c.options.logit_scale);
      }
      const Bound& bound = e < 0 ? of_bias : of_weight;
      compare(e < 0 ? "bias's gradient" : "weight's gradient", v, e,
              e < 0 ? grad_bias.get(v) : grad_weight.get(row * c.width + e), double(exact),
              absolute == 0 ? 0 : bound.of(double(exact), double(absolute)));
    }
  }
}

}  // namespace
}  // namespace sparse_ce

int main(int argc, char** argv) {
  using namespace sparse_ce;
  return run_seeds(argc, argv, draw, kind_of, run_case);
}
