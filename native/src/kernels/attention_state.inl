// The state (m, l, acc) of a query over one split of positions: how it is stored, and merged into the total of the splits before it.

namespace octavo {
namespace OCTAVO_ISA_NS {

// Folds a split's (m, l, acc) into the running total, whose accumulator is the query's place in out.
OCTAVO_INLINE void merge_state(float m, float l, const float* acc, int head_dim, float* total_m, float* total_l, float* out) {
  const float new_m = *total_m > m ? *total_m : m;
  float factors[16] = {*total_m - new_m, m - new_m};
  f32_store(factors, f32_exp(f32_load(factors)));
  const F32x16 keep = f32_set(factors[0]), take = f32_set(factors[1]);
  for (int d = 0; d < head_dim; d += 16) {
    const int n = lanes_left(head_dim, d);
    store_lanes(out + d, f32_fma(load_lanes(out + d, n), keep, load_lanes(acc + d, n) * take), n);
  }
  *total_l = *total_l * factors[0] + l * factors[1];
  *total_m = new_m;
}

OCTAVO_INLINE void begin_total(int head_dim, float* total_m, float* total_l, float* out) {
  *total_m = -__builtin_inff();
  *total_l = 0.0f;
  for (int d = 0; d < head_dim; ++d) out[d] = 0.0f;
}

OCTAVO_INLINE void finish_total(int head_dim, float total_l, float* out) {
  for (int d = 0; d < head_dim; d += 16) {
    const int n = lanes_left(head_dim, d);
    store_lanes(out + d, load_lanes(out + d, n) / f32_set(total_l), n);
  }
}

// A stored state, one per head of the group: m, [16] sums l, acc [stride]. m and padding come first.
OCTAVO_INLINE size_t state_floats(int stride) { return (size_t)stride + 16; }
OCTAVO_INLINE size_t partial_floats(int group, int stride) { return (size_t)round_up_16(group) + (size_t)group * state_floats(stride); }

// Of head g of the group that `partial`, the state of a (row, kv_head, split), is of.
template <class T>
struct StoredState {
  T *m, *l, *acc;
  StoredState(T* partial, int group, int stride, int g)
      : m(partial + g), l(partial + round_up_16(group) + (size_t)g * state_floats(stride)), acc(l + 16) {}
};

// States of splits in order, to be merged into one total: to the bit what merge_state makes of them one after the other.
struct StoredStates {
  static constexpr int kMost = 16;
  const float *l[kMost], *acc[kMost];
  float m[kMost];
  int count = 0;

  void add(const StoredState<const float>& state) {
    m[count] = *state.m;
    l[count] = state.l;
    acc[count++] = state.acc;
  }

  void merge(int head_dim, float* total_m, float* total_l, float* out) const {
    alignas(64) float keep[kMost] = {0}, take[kMost] = {0};
    for (int i = 0; i < count; ++i) {
      const float new_m = *total_m > m[i] ? *total_m : m[i];
      keep[i] = *total_m - new_m;
      take[i] = m[i] - new_m;
      *total_m = new_m;
    }
    f32_store(keep, f32_exp(f32_load(keep)));
    f32_store(take, f32_exp(f32_load(take)));
    for (int i = 0; i < count; ++i) *total_l = *total_l * keep[i] + f32_sum(f32_load(l[i])) * take[i];
    for (int d = 0; d < head_dim; d += 16) {
      const int n = lanes_left(head_dim, d);
      F32x16 sum = load_lanes(out + d, n);
      for (int i = 0; i < count; ++i) sum = f32_fma(sum, f32_set(keep[i]), load_lanes(acc[i] + d, n) * f32_set(take[i]));
      store_lanes(out + d, sum, n);
    }
  }
};

}  // namespace OCTAVO_ISA_NS
}  // namespace octavo
