// Compares softmax over the entries of each row with a float64 reference.
#include "harness.h"

#include "../../csrc/cuda/sparse_softmax.cu"

#include <algorithm>

namespace sparse_ce {
namespace {

struct Case {
  DType dtype, offsets_dtype;
  std::vector<int64_t> lengths;  // of the rows
  int64_t width, max_blocks;
  int64_t offset;                // elements before the values, which determine the alignment
  bool log, ordered, ties;
  double size, masked;           // of the values; share of values that are -inf
  double lead;                   // of a value over the others in some rows; 0 means that there are no such rows
  int64_t entries() const {
    int64_t sum = 0;
    for (const int64_t n : lengths) sum += n;
    return sum;
  }
  std::string text() const {
    char out[256];
    std::snprintf(out, sizeof(out),
                  "dtype %d rows %zu entries %ld width %ld offset %ld log %d ordered %d ties %d lead %g max_blocks %ld",
                  int(dtype), lengths.size(), long(entries()), long(width), long(offset), log, ordered, ties, lead,
                  long(max_blocks));
    return out;
  }
};

Case draw(bool small) {
  Case c{};
  c.dtype = one_of<DType>({DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16});
  c.offsets_dtype = chance(0.5) ? DType::kInt64 : DType::kInt32;
  c.log = chance(0.6), c.ordered = chance(0.25);
  c.width = chance(0.3) ? 1 + below(5) : 1;
  c.offset = below(9), c.max_blocks = below(3);
  c.ties = chance(0.2), c.lead = chance(0.5) ? uniform(0, 80) : 0;
  c.size = one_of<double>({1, 5, 60}), c.masked = chance(0.3) ? 0.2 : 0;
  const bool with_long = chance(small ? 0.15 : 0.3), many = chance(0.2);
  const int64_t rows = 1 + below(many ? 300 : small ? 12 : 40);
  for (int64_t r = 0; r < rows; ++r)
    c.lengths.push_back(chance(0.2) ? 0 : 1 + below(!many && chance(0.3) ? 300 : chance(0.1) ? 90 : 40));
  if (with_long) c.lengths[size_t(below(rows))] = 2049 + below(small ? 9 : 3000);
  // Rows that blocks share: one that begins at a span, one in the middle, or two of which a span has parts.
  if (chance(small ? 0.08 : 0.1)) {
    c.width = chance(0.2) ? 2 : 1;
    for (int64_t k = 0; k < (small ? 1 : 2); ++k)
      c.lengths[size_t(chance(0.4) ? 0 : below(rows))] = cuda::kSpan + below(3) + (chance(0.5) ? below(70000) : 0);
    if (chance(0.4)) c.lengths.resize(2000, 3);
  }
  return c;
}

std::string kind_of(const Case& c) {
  SparseSoftmaxArgs shape{};
  shape.rows = int64_t(c.lengths.size()), shape.entries = c.entries();
  const int64_t longest = *std::max_element(c.lengths.begin(), c.lengths.end());
  const std::string lanes = cuda::plan_of(shape).short_rows ? "rows for lanes" : "rows for warps";
  return lanes + (longest > cuda::kSpan ? ", one for blocks" : longest > cuda::kLongRow ? ", one for a block" : "");
}

void run_case(const Case& c) {
  const int64_t entries = c.entries(), count = entries * c.width, rows = int64_t(c.lengths.size());
  Array values(c.dtype, count, c.offset), grad(c.dtype, count, chance(0.5) ? c.offset : below(9));
  Array output(c.dtype, count, chance(0.5) ? 0 : below(9)), result(c.dtype, count);
  Array offsets(c.offsets_dtype, rows + 1), order(DType::kInt64, entries);
  for (int64_t i = 0; i < count; ++i) {
    values.set(i, chance(c.masked) ? -INFINITY : uniform(-c.size, c.size));
    if (c.ties) values.set(i, std::round(values.get(i)));
    grad.set(i, uniform(-1, 1)), output.set(i, 777), result.set(i, 777);
  }
  std::vector<int64_t> begin{0}, at;
  for (const int64_t n : c.lengths) begin.push_back(begin.back() + n);
  for (int64_t r = 0; r <= rows; ++r) offsets.set(r, double(begin[size_t(r)]));
  for (int64_t i = 0; i < entries; ++i) at.push_back(i);
  for (int64_t i = entries - 1; c.ordered && i > 0; --i) std::swap(at[size_t(i)], at[size_t(below(i + 1))]);
  for (int64_t i = 0; i < entries; ++i) order.set(i, double(at[size_t(i)]));
  for (int64_t r = 0; c.lead > 0 && r < rows; ++r) {
    const int64_t first = begin[size_t(r)], n = begin[size_t(r) + 1] - first;
    if (n == 0 || chance(0.3)) continue;
    const int64_t d = below(c.width), largest = at[size_t(first + below(n))] * c.width + d;
    double max = -INFINITY;
    for (int64_t i = first; i < first + n; ++i) max = std::fmax(max, values.get(at[size_t(i)] * c.width + d));
    if (std::isfinite(max)) values.set(largest, max + c.lead);
  }
  for (Array* a : {&values, &grad, &output, &result, &offsets, &order}) a->upload();

  SparseSoftmaxArgs args{};
  args.offsets = offsets.device(), args.order = c.ordered ? static_cast<const int64_t*>(order.device()) : nullptr;
  args.offsets_dtype = c.offsets_dtype, args.dtype = c.dtype, args.max_blocks = c.max_blocks;
  args.rows = rows, args.entries = entries, args.width = c.width, args.log = c.log;
  args.values = values.device(), args.result = output.device();
  Array space(DType::kFloat64, int64_t(cuda::workspace_of(args) + 7) / 8);
  must(cuda::sparse_softmax(args, space.device(), nullptr), "sparse_softmax");
  args.values = nullptr, args.grad = grad.device(), args.output = output.device(), args.result = result.device();
  must(cuda::sparse_softmax_backward(args, space.device(), nullptr), "sparse_softmax_backward");
  output.download(), result.download();

  const double ulp = c.dtype == DType::kFloat16 ? 0x1p-11 : c.dtype == DType::kBFloat16 ? 0x1p-8 : 0;
  const double least = c.dtype == DType::kFloat16 ? 6e-8 : 1e-37;  // smallest numbers
  const double eps = c.dtype == DType::kFloat64 ? 4e-16 : 3e-7;  // of the arithmetic
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t d = 0; d < c.width; ++d) {
      const auto place = [&](int64_t i) { return at[size_t(i)] * c.width + d; };
      const int64_t from = begin[size_t(r)], to = begin[size_t(r) + 1];
      // The largest value and the largest output are left out of sums.
      long double max = -INFINITY, rest = 0, error = 0;
      int64_t most = from, highest = from;
      for (int64_t i = from; i < to; ++i) {
        if (values.get(place(i)) > max) max = values.get(place(i)), most = i;
        if (output.get(place(i)) > output.get(place(highest))) highest = i;
      }
      for (int64_t i = from; i < to; ++i) {
        const long double below = (long double)values.get(place(i)) - max, power = i == most ? 0 : std::exp(below);
        rest += power, error += power > 0 ? power * (std::fabs(below) + 8) : 0;
      }
      long double own = 0, sum = 0, share = 0, absolute = 0, size = 0;
      bool tie = false;  // of outputs, of which any may be the largest
      for (int64_t i = from; i < to; ++i) {
        size = std::fmax(size, std::fabs(grad.get(place(i))));
        tie = tie || (i != highest && output.get(place(i)) == output.get(place(highest)));
      }
      if (from < to) own = grad.get(place(highest));
      for (int64_t i = from; i < to; ++i) {
        const long double g = grad.get(place(i)), y = output.get(place(i));
        share += c.log ? 0 : y;
        if (i == highest) continue;
        sum += c.log ? g : y * (g - own), absolute += c.log ? std::fabs(g) : y * 2 * size;
      }
      for (int64_t i = from; i < to; ++i) {
        const long double y = ((long double)values.get(place(i)) - max) - std::log1p(rest);
        const double exact = double(c.log ? y : std::exp(y));
        const double of_exact = double(std::fabs(y) + error / (1 + rest)) * (c.log ? 1 : exact);
        compare("output", r, i, output.get(place(i)), exact,
                ulp * std::fabs(exact) + eps * (of_exact + (c.log ? 0 : 4 * exact)) + least);
        // Backward gets the rounded output, so the reference uses it too.
        const long double q = output.get(place(i)), g = grad.get(place(i));
        long double slope = c.log ? g - std::exp(q) * (sum + own) : q * ((g - own) - sum);
        long double parts = c.log ? std::fabs(g) + std::exp(q) * (absolute + 1) * (std::fabs(q) + 1)
                                  : q * (std::fabs(g - own) + absolute + tie * size * std::fabs(1 - share) / eps);
        if (c.log && i == highest && q > -0.5L) {
          slope = -(g * std::expm1(q) + std::exp(q) * sum);
          parts = std::fabs(g * std::expm1(q)) + std::exp(q) * absolute;
        }
        compare("gradient", r, i, result.get(place(i)), double(slope),
                double(ulp * std::fabs(slope) + 4 * eps * parts) + least);
      }
    }
  }
}

}  // namespace
}  // namespace sparse_ce

int main(int argc, char** argv) {
  using namespace sparse_ce;
  return run_seeds(argc, argv, draw, kind_of, run_case);
}
