// The k largest of a row, the lowest of those that tie, against a stable sort.
#include "harness.h"

#include "../../csrc/cuda/topk.cu"

#include <algorithm>

namespace {

struct Case {
  DType dtype, arithmetic;
  int64_t rows, columns, row_stride, offset, k, max_blocks, levels;
  bool largest;
  std::string text() const {
    char out[256];
    std::snprintf(out, sizeof(out), "dtype %d rows %ld columns %ld stride %ld offset %ld k %ld levels %ld largest %d",
                  int(dtype), long(rows), long(columns), long(row_stride), long(offset), long(k), long(levels),
                  largest);
    return out;
  }
};

Case draw(bool small) {
  Case c{};
  c.dtype = one_of<DType>({DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16});
  c.arithmetic = c.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  c.columns = one_of<int64_t>({1, 2, 7, 8, 31, 33, 255, 256, 257, small ? 300 : 5000});
  c.rows = below(small ? 5 : 30);
  c.row_stride = c.columns + (chance(0.4) ? below(20) : 0);
  c.offset = chance(0.4) ? below(9) : 0;
  c.k = 1 + below(std::min<int64_t>(c.columns, 40));
  c.levels = one_of<int64_t>({1, 2, 5, 1000});
  c.max_blocks = chance(0.4) ? 1 + below(2) : 0;
  c.largest = chance(0.7);
  return c;
}

void run_case(const Case& c) {
  Array logits(c.dtype, c.rows ? (c.rows - 1) * c.row_stride + c.columns : 0, c.offset);
  Array last(c.arithmetic, c.rows), above(DType::kInt64, c.rows), ids(DType::kInt64, c.rows * c.k);
  for (int64_t i = 0; i < logits.count(); ++i) logits.set(i, chance(0.02) ? -INFINITY : double(below(c.levels)) - 2);
  std::vector<std::vector<int64_t>> exact;
  for (int64_t r = 0; r < c.rows; ++r) {
    std::vector<int64_t> order(static_cast<size_t>(c.columns));
    for (int64_t i = 0; i < c.columns; ++i) order[size_t(i)] = i;
    const auto z = [&](int64_t i) { return (c.largest ? 1 : -1) * logits.get(r * c.row_stride + i); };
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return z(a) > z(b); });
    order.resize(size_t(c.k));
    const double least = z(order.back());
    int64_t over = 0;
    while (over < c.k && z(order[size_t(over)]) > least) ++over;
    std::sort(order.begin(), order.begin() + over);
    const bool nan = chance(0.1);  // then the row stays as it is
    last.set(r, nan ? NAN : (c.largest ? 1 : -1) * least), above.set(r, double(over));
    for (int64_t i = 0; i < c.k; ++i) ids.set(r * c.k + i, 77);
    if (nan) std::fill(order.begin(), order.end(), 77);
    exact.push_back(order);
  }
  for (Array* a : {&logits, &last, &above, &ids}) a->upload();
  TopkArgs args{};
  args.logits = logits.device(), args.dtype = c.dtype, args.rows = c.rows, args.columns = c.columns;
  args.row_stride = c.row_stride, args.k = c.k, args.last = last.device();
  args.above = static_cast<const int64_t*>(above.device()), args.ids = static_cast<int64_t*>(ids.device());
  args.largest = c.largest, args.max_blocks = c.max_blocks;
  if (c.rows > 0) must(cuda::topk_ids(args, nullptr), "topk_ids");
  ids.download();
  for (int64_t r = 0; r < c.rows; ++r)
    for (int64_t i = 0; i < c.k; ++i) compare("id", r, i, ids.get(r * c.k + i), double(exact[size_t(r)][size_t(i)]), 0);
}

std::string kind_of(const Case& c) { return c.levels < 1000 ? "ties" : "few ties"; }

}  // namespace

int main(int argc, char** argv) { return run_seeds(argc, argv, draw, kind_of, run_case); }
