// Compares the k largest logits of a row, where ties go to the lowest class, with a stable sort.
#include "harness.h"

#include "../../csrc/cuda/topk.cu"

#include <algorithm>

namespace sparse_ce {
namespace {

struct Case {
  DType dtype;
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
  c.columns = one_of<int64_t>({1, 2, 7, 8, 31, 33, 255, 256, 257, small ? 1500 : 5000});
  c.rows = below(small ? 5 : 30);
  c.row_stride = c.columns + (chance(0.4) ? below(20) : 0);
  c.offset = chance(0.4) ? below(9) : 0;
  // k is at most the number of positions of all packs, or more; the list has room for all ties, or not.
  c.k = 1 + below(chance(0.9) ? std::min<int64_t>(c.columns, 40) : c.columns);
  c.levels = one_of<int64_t>({1, 2, 5, 1000});
  c.max_blocks = chance(0.4) ? 1 + below(2) : 0;
  c.largest = chance(0.7);
  return c;
}

void run_case(const Case& c) {
  Array logits(c.dtype, c.rows ? (c.rows - 1) * c.row_stride + c.columns : 0, c.offset);
  Array ids(DType::kInt64, c.rows * c.k);
  for (int64_t i = 0; i < logits.count(); ++i) {
    const double z = double(below(c.levels)) - 2;
    const double special = one_of<double>({-INFINITY, -INFINITY, double(NAN), -double(NAN)});
    logits.set(i, chance(0.02) ? special : z == 0 && chance(0.5) ? -0.0 : z);
  }
  for (Array* a : {&logits, &ids}) a->upload();
  TopkArgs args{};
  args.logits = logits.device(), args.dtype = c.dtype, args.rows = c.rows, args.columns = c.columns;
  args.row_stride = c.row_stride, args.k = c.k, args.ids = static_cast<int64_t*>(ids.device());
  args.largest = c.largest, args.max_blocks = c.max_blocks;
  Array space(DType::kInt64, c.rows > 0 ? int64_t(cuda::workspace_of(args) + 7) / 8 : 0);
  space.upload();
  if (c.rows > 0) must(cuda::topk_ids(args, space.device(), nullptr), "topk_ids");
  ids.download();
  for (int64_t r = 0; r < c.rows; ++r) {
    std::vector<int64_t> order(static_cast<size_t>(c.columns));
    for (int64_t i = 0; i < c.columns; ++i) order[size_t(i)] = i;
    // NaN is larger than any number.
    const auto z = [&](int64_t i) { return logits.get(r * c.row_stride + i); };
    const auto above = [](double a, double b) { return a > b || (a != a && b == b); };
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return c.largest ? above(z(a), z(b)) : above(z(b), z(a)); });
    for (int64_t i = 0; i < c.k; ++i) compare("id", r, i, ids.get(r * c.k + i), double(order[size_t(i)]), 0);
  }
}

std::string kind_of(const Case& c) { return c.levels < 1000 ? "ties" : "few ties"; }

}  // namespace
}  // namespace sparse_ce

int main(int argc, char** argv) {
  using namespace sparse_ce;
  return run_seeds(argc, argv, draw, kind_of, run_case);
}
