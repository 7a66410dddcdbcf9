// select_stats.h - Defines the statistics of a row that select computes. They form monoids, so tiles, threads, blocks
// and shards all merge alike.
#pragma once

#include "../core/math.h"

#include <cstring>
#include <type_traits>

namespace sparse_ce {

// Holds statistics of some of a row's logits. They form a monoid, like RowStats. The caller chooses which to compute.
template <typename acc_t>
struct SelectStats {
  RowStats<acc_t> row;
  acc_t spread = 0;  // sum_j exp(z_j - max) (z_j - max)
  acc_t squares = -1;  // sum_j exp(z_j - max)^2 over the same j as row.rest, or -1 if that is
  acc_t total = 0;  // sum_j z_j
  int32_t above = 0;  // number of logits that are above the ranked one, below 0 if there is none
  int32_t argmax = -1;  // -1 if no logit is above -inf or argmax is not requested

  SCE_HD bool empty() const { return row.empty(); }

  // Returns the number that a logit must exceed to be the argmax. row.max starts at the lowest finite number, which is
  // itself a valid first argmax.
  SCE_HD acc_t highest() const { return argmax < 0 ? -acc_t(INFINITY) : row.max; }

  // Returns a spread relative to a maximum that is above by -shift. `sum` is that of its exponentials, and `factor` is
  // exp(shift).
  SCE_HD static acc_t moved(acc_t spread, acc_t sum, acc_t shift, acc_t factor) {
    return factor == acc_t(0) ? acc_t(0) : factor * (spread + shift * sum);
  }

  SCE_HD void merge(const SelectStats& other) {
    const bool before = other.row.max == row.max && static_cast<uint64_t>(other.argmax) < static_cast<uint64_t>(argmax);
    if (other.row.max > row.max || before) argmax = other.argmax;
    const bool mine = row.max >= other.row.max;
    const acc_t shift = (mine ? other.row.max : row.max) - (mine ? row.max : other.row.max);  // <= 0
    const acc_t factor = exponential(shift), of_low = mine ? other.spread : spread;
    spread = (mine ? spread : other.spread) + moved(of_low, mine ? other.row.total() : row.total(), shift, factor);
    squares = (mine ? squares : other.squares) + (acc_t(1) + (mine ? other.squares : squares)) * (factor * factor);
    row.merge(other.row);
    total += other.total;
    above += other.above;
  }

  // Returns e (z - max) for e = exp(z - max). It is 0 if e is 0, even if z is -inf.
  SCE_HD static acc_t spread_of(acc_t e, acc_t below) { return e * (below < acc_t(-1000) ? acc_t(-1000) : below); }

  // Adds the logits z[begin, end) to `row`, `spread` and `squares`; see RowStats.
  template <typename logits_t>
  SCE_HD void push(const logits_t& z, int64_t begin, int64_t end) {
    SelectStats added;
    acc_t to = added.row.max;
    SCE_SIMD_MAX(to)
    for (int64_t i = begin; i < end; ++i) to = z[i] > to ? z[i] : to;
    added.row.max = to;
    const Added all(z, begin, end, to);
    added.spread = all.spread, added.squares = all.squares - acc_t(1);
    added.row.rest = all.sum - acc_t(1);
    if (added.row.hides_rest()) {
      int64_t at = begin;
      while (!(z[at] == to)) ++at;
      const Added before(z, begin, at, to), after(z, at + 1, end, to);
      added.row.rest = before.sum + after.sum, added.squares = before.squares + after.squares;
    }
    const int32_t place = argmax;
    merge(added);
    argmax = place;
  }

  // Adds them in one pass. Returns false, and adds nothing, if their maximum exceeds that of the others.
  template <typename logits_t>
  SCE_HD bool push_near(const logits_t& z, int64_t begin, int64_t end) {
    const Added added(z, begin, end, row.max);
    if (!(added.highest <= row.max)) return false;
    row.rest += added.sum;
    spread += added.spread;
    squares += added.squares;
    return true;
  }

  SCE_HD acc_t entropy() const {
    const acc_t entropy = row.log_total() - spread / row.total();
    return entropy < acc_t(0) ? acc_t(0) : entropy;
  }
  // Returns log((1 + squares) / (1 + rest)^2). If one class has most of the probability, it is log(1 - less), where
  // less is no difference: the squares are at most rest^2.
  SCE_HD acc_t collision() const {
    const acc_t rest = row.rest, total = row.total();
    const acc_t less = (acc_t(2) * rest + (rest * rest - squares)) / (total * total);
    return less < acc_t(0.5) ? std::log1p(-less) : std::log1p(squares) - acc_t(2) * row.log_total();
  }

 private:
  // Holds the sums of some logits, relative to `from`.
  struct Added {
    acc_t highest, sum, spread, squares;

    template <typename logits_t>
    SCE_HD Added(const logits_t& z, int64_t begin, int64_t end, acc_t from) {
      acc_t highests[kLanes], sums[kLanes] = {}, spreads[kLanes] = {}, all_squares[kLanes] = {};
      for (int64_t k = 0; k < kLanes; ++k) highests[k] = from;
      const auto add = [&](int64_t k, acc_t x) __attribute__((always_inline)) {
        highests[k] = x > highests[k] ? x : highests[k];
        const acc_t e = exponential(x - from);
        sums[k] += e;
        spreads[k] += spread_of(e, x - from);
        all_squares[k] += e * e;
      };
      int64_t i = begin;
      for (; i + kLanes <= end; i += kLanes) {
        SCE_SIMD()
        for (int64_t k = 0; k < kLanes; ++k) add(k, z[i + k]);
      }
      SCE_SIMD()
      for (int64_t k = 0; k < end - i; ++k) add(k, z[i + k]);
      highest = from;
      for (int64_t k = 0; k < kLanes; ++k) highest = highests[k] > highest ? highests[k] : highest;
      sum = sum_of_lanes(sums);
      spread = sum_of_lanes(spreads);
      squares = sum_of_lanes(all_squares);
    }
  };
};

// Holds statistics of some of a row's classes: of all classes, of those outside S, and of those in S (`chosen`), which
// are added last.
template <typename acc_t>
struct Scanned {
  SelectStats<acc_t> all;
  RowStats<acc_t> tail, chosen;

  SCE_HD void merge(const Scanned& other) {
    all.merge(other.all);
    tail.merge(other.tail);
    chosen.merge(other.chosen);
  }
  // Returns log(T / (T + E)), where T and E are the sums outside and in S. A difference of logarithms would have no
  // digits left if E is small.
  SCE_HD acc_t log_tail() const {
    const acc_t odds = (tail.max - chosen.max) + (tail.log_total() - chosen.log_total());  // log(T / E)
    if (odds < acc_t(0)) return odds - std::log1p(exponential(odds));
    return acc_t(0) - std::log1p(exponential(-odds));
  }
};

// Selects the requested outputs.
struct RequestedOutputs {
  bool loss, log_probs, log_tail, entropy, mean_logit, argmax, collision, rank;
};

// Holds the statistics of a row that one shard of the classes sends to the others. They form a monoid: all ranks merge
// the same numbers in the same order and get bitwise equal results.
template <typename acc_t>
struct ShardStats : Scanned<acc_t> {
  TargetStats<acc_t> entries;  // relative to all.row.max

  SCE_HD void merge(ShardStats other) {
    const acc_t mine = this->all.row.max, its = other.all.row.max, to = its > mine ? its : mine;
    entries.move_max(mine, to);
    other.entries.move_max(its, to);
    entries.merge(other.entries);
    Scanned<acc_t>::merge(other);
  }

  // Calls f(number) for each number that is sent, in order. `smoothed` is true if labels are smoothed.
  template <typename function_t>
  SCE_HD void for_each(const RequestedOutputs& outputs, bool smoothed, const function_t& f) {
    RowStats<acc_t>& row = this->all.row;
    f(row.max), f(row.rest);
    if (outputs.loss) f(entries.dot), f(entries.mass);
    if (smoothed) f(row.weighted), f(row.weight);
    if (outputs.log_tail) {
      for (RowStats<acc_t>* part : {&this->tail, &this->chosen}) f(part->max), f(part->rest);
    }
    if (outputs.entropy) f(this->all.spread);
    if (outputs.mean_logit) f(this->all.total);
    if (outputs.argmax) as_number(this->all.argmax, f);
    if (outputs.collision) f(this->all.squares);
    if (!outputs.rank) return;
    if (this->all.above < 0) this->all.above = -1;  // of several parts of the row
    as_number(this->all.above, f);
  }
  SCE_HD static int64_t numbers(const RequestedOutputs& outputs, bool smoothed) {
    int64_t count = 0;
    ShardStats().for_each(outputs, smoothed, [&](acc_t&) { ++count; });
    return count;
  }

 private:
  // Calls f(number) for a class or a count, whose bits the number has: float32 cannot hold every class. No class is 0,
  // because the bits of -1 are a NaN.
  template <typename value_t, typename function_t>
  SCE_HD static void as_number(value_t& value, const function_t& f) {
    auto integer = static_cast<std::conditional_t<sizeof(acc_t) == 4, int32_t, int64_t>>(value + 1);
    acc_t bits;
    std::memcpy(&bits, &integer, sizeof(bits));
    f(bits);
    std::memcpy(&integer, &bits, sizeof(bits));
    value = static_cast<value_t>(integer) - 1;
  }
};

// Compares logits with that of the row's ranked class, before the transform: a saturated softcap does not make them
// equal. A negative scale reverses their order, and a scale of 0 makes them equal. NaN is above every logit, so that
// the rank of a broken row is not its best one.
template <typename acc_t>
struct Ranked {
  acc_t logit;
  bool exists, reverse, equal;

  // Returns the number of logits above it before any has been compared.
  SCE_HD int32_t none_above() const { return exists ? 0 : -1; }
  SCE_HD bool compares() const { return exists && !equal; }
  SCE_HD bool is_above(acc_t x) const { return is_above(x, logit, reverse); }
  SCE_HD static bool is_above(acc_t x, acc_t logit, bool reverse) { return reverse ? !(x >= logit) : !(x <= logit); }
};

}  // namespace sparse_ce
