// Checks the sums over the entries of each class of a row, in their order, and how often a row is read.
#include "harness.h"

#include "../../csrc/cuda/device/classes_of_row.cuh"

#include <algorithm>

namespace sparse_ce {
namespace {

constexpr int64_t kReads = 12;  // per entry, in each part of a row

// Counts the reads of a target.
struct Counted : TargetView {
  unsigned long long* reads;
  __device__ int64_t index(int64_t i) const {
    atomicAdd(reads, 1ull);
    return TargetView::index(i);
  }
};

// `of_entry` receives, for each entry that is the first of its class, the sum of the class, otherwise `kNone`.
constexpr float kNone = -1;
template <int kWidth, bool of_select>
__global__ void __launch_bounds__(cuda::kThreads)
    classes_kernel(Counted target, int64_t parts, uint32_t* slots, float* of_entry) {
  using Group = cuda::RowGroup<kWidth>;
  for (int64_t item = Group::number(); item < target.rows * parts; item += Group::count()) {
    const int64_t part = item % parts;
    const int64_t begin = target.num_classes * part / parts, end = target.num_classes * (part + 1) / parts;
    const EntryRange range = target.row(item / parts);
    const cuda::ClassesOfRow<kWidth, of_select, true, float, Counted> classes(target, range, begin, end, slots);
    for (int64_t i = range.begin + Group::rank(); i < range.end; i += kWidth) {
      const int64_t column = of_select ? target.chosen<float>(i).column : target.entry<float>(i).column;
      if (column < begin || column >= end) continue;
      float sum;
      const bool first = classes.sum(i, column, [](int64_t, const Entry<float>& entry) { return entry.value; }, sum);
      of_entry[i] = first ? sum : kNone;
    }
  }
}

struct Case {
  int64_t width, rows, entries, classes, distinct, parts;
  bool sorted, of_select;
  std::string text() const {
    char out[256];
    std::snprintf(out, sizeof(out),
                  "width %ld rows %ld entries %ld classes %ld distinct %ld parts %ld sorted %d select %d", long(width),
                  long(rows), long(entries), long(classes), long(distinct), long(parts), sorted, of_select);
    return out;
  }
};

Case draw(bool small) {
  Case c{};
  c.width = one_of<int64_t>({1, cuda::kWarp, cuda::kThreads});
  c.entries = 1 + below(chance(0.3) ? cuda::kWarp + 2 : small ? 600 : 4096);
  c.rows = c.entries > 500 ? 1 + below(2) : 1 + below(9);
  if (!small && chance(0.05)) c.entries = 20000, c.rows = 1;
  c.classes = 1 + below(40000);
  // There are few classes, each about twice, or most of them only once.
  const int64_t distinct = one_of<int64_t>({1, 2, 3, c.entries / 40 + 1, c.entries / 2 + 1, c.classes, c.classes});
  c.distinct = std::min(c.classes, distinct);
  c.parts = 1 + below(3);
  c.sorted = chance(0.25), c.of_select = chance(0.5);
  return c;
}

void run_case(const Case& c) {
  const int64_t entries = c.rows * c.entries;
  Array indices(chance(0.5) ? DType::kInt64 : DType::kInt32, entries), values(DType::kFloat32, entries);
  Array slots(DType::kInt64, entries * cuda::kSumSlots / 2), sums(DType::kFloat32, entries), reads(DType::kInt64, 1);
  for (int64_t r = 0; r < c.rows; ++r) {
    std::vector<int64_t> row(static_cast<size_t>(c.entries));
    for (int64_t& column : row) column = below(c.distinct) * (c.classes / c.distinct);
    if (c.sorted) std::sort(row.begin(), row.end());
    for (int64_t i = 0; i < c.entries; ++i) {
      indices.set(r * c.entries + i, double(row[size_t(i)]));
      values.set(r * c.entries + i, chance(0.1) ? 0 : uniform(0, 1));  // or padding
    }
  }
  reads.set(0, 0);
  for (int64_t i = 0; i < entries; ++i) sums.set(i, 7);
  for (Array* a : {&indices, &values, &sums, &reads}) a->upload();
  Counted target{};
  target.indices = indices.device(), target.indices_dtype = indices.dtype();
  target.values = values.device(), target.values_dtype = values.dtype();
  target.rows = c.rows, target.entries = entries, target.width = c.entries, target.num_classes = c.classes;
  target.ignore_index = -100, target.reads = static_cast<unsigned long long*>(reads.device());
  auto* of_entry = static_cast<float*>(sums.device());
  const auto run = [&](auto kernel) {
    return cuda::launch(nullptr, 2, cuda::kThreads, kernel, target, c.parts, static_cast<uint32_t*>(slots.device()),
                        of_entry);
  };
  const auto of_width = [&](auto one, auto warp, auto block) {
    return c.width == 1 ? run(one) : c.width == cuda::kWarp ? run(warp) : run(block);
  };
  must(c.of_select
           ? of_width(classes_kernel<1, true>, classes_kernel<cuda::kWarp, true>, classes_kernel<cuda::kThreads, true>)
           : of_width(classes_kernel<1, false>, classes_kernel<cuda::kWarp, false>,
                      classes_kernel<cuda::kThreads, false>),
       "classes");
  for (Array* a : {&sums, &reads}) a->download();

  if (c.entries > cuda::kWarp) {
    const double most = double(kReads * c.parts * entries);
    compare("reads", 0, 0, std::max(reads.get(0), most), most, 0);
  }
  for (int64_t r = 0; r < c.rows; ++r) {
    struct Sum {
      int64_t first;
      float in_order;
      double exact;
    };
    std::map<int64_t, Sum> of_class;
    for (int64_t i = r * c.entries; i < (r + 1) * c.entries; ++i) {
      if (values.get(i) == 0) continue;
      Sum& sum = of_class.insert({int64_t(indices.get(i)), {i, 0, 0}}).first->second;
      sum.in_order += float(values.get(i)), sum.exact += values.get(i);
    }
    for (int64_t i = r * c.entries; i < (r + 1) * c.entries; ++i) {
      if (values.get(i) == 0) continue;
      const Sum& sum = of_class[int64_t(indices.get(i))];
      compare_bits("sum", r, i, sums.get(i), sum.first == i ? double(sum.in_order) : double(kNone));
      if (sum.first == i) compare("exact", r, i, sums.get(i), sum.exact, 6e-8 * double(c.entries) * sum.exact);
    }
  }
}

std::string kind_of(const Case& c) {
  const std::string threads = c.width == 1 ? "a thread" : c.width == cuda::kWarp ? "a warp" : "a block";
  if (c.entries <= cuda::kWarp) return threads + ", few";
  return threads + (c.sorted ? ", sorted" : c.distinct <= c.entries ? ", repeated" : ", unsorted");
}

}  // namespace
}  // namespace sparse_ce

int main(int argc, char** argv) {
  using namespace sparse_ce;
  return run_seeds(argc, argv, draw, kind_of, run_case);
}
