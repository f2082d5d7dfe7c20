// SPDX-License-Identifier: MIT
// Row norms, backward: dx, the residual stream's gradient, dgate, and sums for dweight and dbias,
// in one kernel. x is what was normalised, which the forward calls s.
//
//   p       = x * g(gate)    if pre-gate, else x
//   r       = (p - mean) * rstd                                            mean only if center
//   n       = k * r * (weight + weight_offset) + bias
//   dn      = dy * g(gate)   if post-gate, else dy
//   dr      = k * dn * (weight + weight_offset)
//   dp      = rstd * (dr - r * mean(r * dr) - mean(dr))                    mean(dr) only if center
//   ds      = (dp * g(gate)  if pre-gate, else dp) + dresidual_out
//   dx      = ds * g(gate)   if the gate is on the branch, else ds;        dresidual = ds
//   dgate   = g'(gate) * dp * x    if pre-gate;    g'(gate) * dy * n    if post-gate;
//             g'(gate) * ds * branch               if the gate is on the branch
//   dweight = sum over rows of dn * k * r
//   dbias   = sum over rows of dn
//
// The saved mean is rounded, so its error is measured and removed (see the forward):
//   correction  = mean(p - mean)
//   sum(r * dr) = rstd * (sum((p - mean) * dr) - correction * sum(dr))
//
// The rows that share weight and bias are a segment; each segment has sums of its own. If each row
// has its own weight or bias, the kernel writes the gradient itself.
//
// Each block adds up dweight and dbias over the rows that it walks, and writes one row of partial
// sums (param_sums.cuh). param_grad.cu adds up these rows in a fixed order. Operands that no wanted
// gradient needs are absent.
#include "math.cuh"
#include "param_sums.cuh"
#include "parameters.cuh"

#ifndef OWN_PARAMETERS
#define OWN_PARAMETERS false
#define OWN_DWEIGHT_T absent
#define OWN_DBIAS_T absent
#define ACCUMULATE false
#define BRANCH_T absent
#define DGATE_SUMS false
#endif

struct Build : RowBuild {
  using dy_t = DY_T;
  using dresidual_out_t = DRESIDUAL_OUT_T;
  using dx_t = DX_T;
  using dresidual_t = DRESIDUAL_T;
  using dgate_t = DGATE_T;
  static constexpr bool dweight = DWEIGHT;
  static constexpr bool dbias = DBIAS;
  // The gradients of parameters of which each row has its own.
  using own_dweight_t = OWN_DWEIGHT_T;
  using own_dbias_t = OWN_DBIAS_T;
  static constexpr bool own_parameters = OWN_PARAMETERS;  // rows of a segment differ in parameters
  static constexpr bool accumulate = ACCUMULATE;  // add to what own_dweight and own_dbias hold
  using branch_t = BRANCH_T;
  // Whether rows share a gate of the branch, or its row is one number: then dgate is a sum.
  static constexpr bool dgate_sums = DGATE_SUMS;
  // Whether the gradient of p is needed.
  static constexpr bool dp = present<dx_t> || present<dresidual_t> || dgate_sums ||
                             (present<dgate_t> && (pre_gate || branch_gate));
  // Whether the kernel reduces over a row. If not, the first pass over the row computes nothing.
  static constexpr bool reduces = center || dp;
  static constexpr int stages = STAGES;                   // rows copied ahead to shared memory
  static constexpr bool sums_in_shared = SUMS_IN_SHARED;  // whether shared memory holds sums
};

template <class B>
struct SegmentArguments {
  Segments segments;
  Rows<typename B::own_dweight_t, 1> own_dweight;
  Rows<typename B::own_dbias_t, 1> own_dbias;
  Rows<const typename B::branch_t> branch;  // what the forward added to the stream, its x
  typename B::compute_t* dgate_sums;
};

template <class B>
struct Arguments : either<(SEGMENT_AXES > 0), SegmentArguments<B>, absent> {
  using C = typename B::compute_t;
  Rows<const typename B::dy_t> dy;
  Rows<const typename B::dresidual_out_t> dresidual_out;
  Rows<const typename B::x_t> x;
  GateRows<const typename B::gate_t> gate;
  Rows<typename B::dx_t> dx;
  Rows<typename B::dgate_t> dgate;
  Rows<typename B::dresidual_t> dresidual;
  Parameter<const typename B::weight_t> weight;
  Parameter<const typename B::bias_t> bias;
  const C *mean, *rstd;
  C *dweight_sums, *dbias_sums;
  index_t rows, groups, width;  // rows of each group
  Number<C> k, weight_offset;
};

enum RowSums { SumP, SumDr, SumPDr };  // sums of p - mean, dr / k, their product

// The activated gate and its derivative at each item of a pack.
template <class B>
using GatePack = Pack<Activated<Item<B>>, items_per_pack<B>>;

template <class B, class G, class At>
__device__ inline Activated<Item<B>> gate_at(const G& gate, At item) {
  Activated<Item<B>> activated = {};
  if constexpr (present<typename B::gate_t>) activated = B::activation::at(read<B>(gate, item));
  return activated;
}

// The operands that have one element for each row. load() loads only those that are needed.
template <class B>
struct RowScalars {
  typename B::compute_t rstd = 0, mean = 0;

  static __device__ RowScalars load(const Arguments<B>& arguments, const Row<B>& row) {
    RowScalars found;
    if (present<typename B::x_t> && row.exists) found.rstd = arguments.rstd[row.index];
    if (B::center && row.exists) found.mean = arguments.mean[row.index];
    return found;
  }
};

// An item of the inputs, with the gate applied to x (pre-gate) or to dy (post-gate).
template <class B>
struct GatedItem {
  Item<B> dy, dn, x = {}, p = {};

  template <class Dy, class X, class At>
  __device__ GatedItem(const Dy& dy_pack, const X& x_pack, const Activated<Item<B>>& gate, At item)
      : dy(read<B>(dy_pack, item)), dn(dy) {
    if constexpr (present<typename B::x_t>) p = x = read<B>(x_pack, item);
    if constexpr (B::pre_gate) p *= gate.value;
    if constexpr (B::post_gate) dn *= gate.value;
  }
};

// A pack of the gradient of a parameter of which each row has its own.
template <class B, class T>
struct OwnGradient {
  static constexpr bool adds = B::accumulate && present<T>;
  RowOutput<B, T, true> output;
  LoadedPack<B, either<adds, T, absent>> before = {};

  template <class At>
  __device__ OwnGradient(T* row, At at) : output(row) {
    if constexpr (adds) before = load_at<B>(row, at);
  }
  template <class At>
  __device__ void add(At item, Item<B> v) {
    if constexpr (adds) v += read<B>(before, item);
    if constexpr (present<T>) write(output, item, v);
  }
  template <class At>
  __device__ void store(At at) {
    if constexpr (present<T>) output.store(at);
  }
};

// A row: its operands, and its factors.
//   k * r = ((p - mean) - correction) * k_rstd
//   dp    = dn * (weight + weight_offset) * k_rstd + k * r * r_factor + offset
template <class B>
struct BackwardRow {
  using C = typename B::compute_t;
  RowPacks<B, typename B::dy_t> dy;
  RowPacks<B, typename B::x_t> x;
  GatePacks<B, typename B::gate_t, B::branch_gate> gate;
  RowPacks<B, typename B::dresidual_out_t, true> dresidual_out;
  RowPacks<B, typename B::branch_t, true> branch;
  typename B::dx_t* dx;
  typename B::dresidual_t* dresidual;
  typename B::dgate_t* dgate;
  typename B::own_dweight_t* own_dweight = nullptr;
  typename B::own_dbias_t* own_dbias = nullptr;
  RowScalars<B> scalars;
  C correction = 0, k_rstd = 0, r_factor = 0, offset = 0;

  __device__ BackwardRow(const Arguments<B>& arguments, const Row<B>& row)
      : dy(row.of(arguments.dy)),
        x(row.of(arguments.x)),
        gate(row.of(arguments.gate)),
        dresidual_out(row.of(arguments.dresidual_out)),
        branch(branch_of(arguments, row)),
        dx(row.of(arguments.dx)),
        dresidual(row.of(arguments.dresidual)),
        dgate(row.of(arguments.dgate)) {
    if constexpr (SEGMENT_AXES > 0) {
      own_dweight = arguments.own_dweight.at(row.index);
      own_dbias = arguments.own_dbias.at(row.index);
    }
  }

  // Loads the inputs that the first pass over a streamed row needs.
  template <class Chunk>
  __device__ void load(const Chunk& chunk) {
    dy.load(chunk);
    x.load(chunk);
    if constexpr (!B::branch_gate) gate.load(chunk);
  }
  // Loads the other inputs.
  template <class Chunk>
  __device__ void load_rest(const Chunk& chunk) {
    dresidual_out.load(chunk);
    if constexpr (B::branch_gate) gate.load(chunk);
    branch.load(chunk);
  }
  static __device__ auto branch_of(const Arguments<B>& arguments, const Row<B>& row) {
    if constexpr (present<typename B::branch_t>)
      return row.of(arguments.branch);
    else
      return static_cast<const absent*>(nullptr);
  }

  // Returns a pack of the gate, if it is needed.
  template <bool needed, class At>
  __device__ auto gate_if(At at) const {
    if constexpr (needed)
      return gate[at];
    else
      return absent{};
  }
  // p - mean
  template <class V>
  __device__ V shifted(V p) const {
    if constexpr (B::center) p -= scalars.mean;
    return p;
  }
  template <class At>
  __device__ GatePack<B> gates(At at) const {
    const auto pack = gate[at];
    GatePack<B> gates;
    for_each_item<B>(at, [&](auto item) { gates.item[item.index] = gate_at<B>(pack, item); });
    return gates;
  }

  // Adds a pack to the sums over the row. Returns the pack's gates, which a CPU may keep.
  template <class At>
  __device__ GatePack<B> add_to(ItemSums<B> (&sums)[3], At at,
                                const Parameters<B>& parameters) const {
    const auto dy_pack = dy[at];
    const auto x_pack = x[at];
    const auto gate_pack = gate_if<!B::branch_gate>(at);
    GatePack<B> gates;
    for_each_item<B>(at, [&](auto item) {
      if constexpr (!B::branch_gate) gates.item[item.index] = gate_at<B>(gate_pack, item);
      const GatedItem<B> gated(dy_pack, x_pack, gates.item[item.index], item);
      const auto p = clear_outside<B>(shifted(gated.p), item);
      if constexpr (B::center) sums[SumP].add(item, p);
      if constexpr (B::dp) {
        auto dr = gated.dn;
        if constexpr (present<typename B::weight_t>) dr *= parameters.factor(at, item);
        if constexpr (B::center) sums[SumDr].add(item, dr);
        sums[SumPDr].add_product(item, p, dr);
      }
    });
    return gates;
  }

  template <class Sums>
  __device__ void find_factors(const Arguments<B>& arguments, Team<B>& team, Sums (&sums)[3]) {
    const C width = C(row_width(arguments)), k = arguments.k;
    C sum_q_dr = 0;
    if constexpr (B::center && !B::dp) {
      correction = math::divided(team.all_reduce(sums[SumP]).item[0], width);
    } else if constexpr (B::center) {
      const auto found = team.all_reduce(sums[SumP], sums[SumDr], sums[SumPDr]);
      correction = math::divided(found.item[SumP], width);
      offset = -scalars.rstd * math::divided(k * found.item[SumDr], width);
      sum_q_dr = fma(-correction, found.item[SumDr], found.item[SumPDr]);
    } else if constexpr (B::dp) {
      sum_q_dr = team.all_reduce(sums[SumPDr]).item[0];
    }
    k_rstd = k * scalars.rstd;
    r_factor = math::divided(-scalars.rstd * (scalars.rstd * sum_q_dr), width);
  }

  // Writes the gradients of a pack, and adds to those that are sums.
  template <class At, class Gates, class Dweight, class Dbias, class Dgate>
  __device__ void write(At at, const Gates& gates, const Parameters<B>& parameters,
                        Dweight& dweight, Dbias& dbias, Dgate& dgate_sums) const {
    const auto dy_pack = dy[at];
    const auto x_pack = x[at];
    const auto dresidual_out_pack = dresidual_out[at];
    const auto branch_pack = branch[at];
    const auto k_rstd = broadcast<B>(this->k_rstd);
    const auto r_factor = broadcast<B>(this->r_factor), offset = broadcast<B>(this->offset);
    RowOutput<B, typename B::dx_t> dx(this->dx);
    RowOutput<B, typename B::dresidual_t> dresidual(this->dresidual);
    RowOutput<B, typename B::dgate_t> dgate(this->dgate);
    OwnGradient<B, typename B::own_dweight_t> own_dweight(this->own_dweight, at);
    OwnGradient<B, typename B::own_dbias_t> own_dbias(this->own_dbias, at);
    for_each_item<B>(at, [&](auto item) {
      const auto& activated = gates.item[item.index];
      const GatedItem<B> gated(dy_pack, x_pack, activated, item);
      auto q = shifted(gated.p);
      if constexpr (B::center) q -= correction;
      const auto k_r = q * k_rstd, rounded = as_rounded<B>(k_r);
      dweight.add_product(item, gated.dn, rounded);
      dbias.add(item, gated.dn);
      own_dweight.add(item, gated.dn * rounded);
      own_dbias.add(item, gated.dn);
      auto dp = gated.dn;
      if constexpr (present<typename B::weight_t>) dp *= parameters.factor(at, item);
      dp = fma(dp, k_rstd, fma(k_r, r_factor, offset));
      auto ds = dp;
      if constexpr (B::pre_gate) ds *= activated.value;
      if constexpr (present<typename B::dresidual_out_t>) ds += read<B>(dresidual_out_pack, item);
      if constexpr (present<typename B::dx_t>)
        ::write(dx, item, B::branch_gate ? ds * activated.value : ds);
      if constexpr (present<typename B::dresidual_t>) ::write(dresidual, item, ds);
      if constexpr (present<typename B::branch_t>) {
        const auto slope = activated.derivative * ds, v = read<B>(branch_pack, item);
        dgate_sums.add_product(item, slope, v);
        if constexpr (present<typename B::dgate_t>) ::write(dgate, item, slope * v);
      }
      if constexpr (present<typename B::dgate_t> && B::pre_gate)
        ::write(dgate, item, activated.derivative * (dp * gated.x));
      if constexpr (present<typename B::dgate_t> && B::post_gate)
        ::write(dgate, item,
                activated.derivative * (gated.dy * parameters.affine(rounded, at, item)));
    });
    dx.store(at);
    dresidual.store(at);
    dgate.store(at);
    own_dweight.store(at);
    own_dbias.store(at);
  }
};

// A row's own parameters, which are still to be loaded. If all rows of a segment share them, the
// shared ones take their place.
template <class B, bool own = B::own_parameters>
struct RowParameters {
  Parameters<B> of_row;

  __device__ RowParameters(const Arguments<B>& arguments, const Row<B>& row)
      : of_row(arguments, row.walk.share, row.index) {}
  __device__ Parameters<B>& parameters(Parameters<B>&) { return of_row; }
};
template <class B>
struct RowParameters<B, false> {
  __device__ RowParameters(const Arguments<B>&, const Row<B>&) {}
  __device__ Parameters<B>& parameters(Parameters<B>& shared) const { return shared; }
};

// Inputs of the next rows, which are being copied to shared memory, each row to a slot. A thread
// takes only the packs that it copied itself, so no barrier is needed. A result may share the
// memory of an input: a pack is overwritten only by the thread that has already taken it.
template <class B>
struct StagedRows {
  StagedPacks<B, typename B::dy_t> dy;
  StagedPacks<B, typename B::x_t> x;
  StagedPacks<B, either<B::scalar_gate, absent, typename B::gate_t>> gate;
  StagedPacks<B, typename B::dresidual_out_t> dresidual_out;
  StagedPacks<B, typename B::branch_t> branch;

  __device__ explicit StagedRows(SharedMemory& memory)
      : dy(memory), x(memory), gate(memory), dresidual_out(memory), branch(memory) {}

  __device__ void copy(const Arguments<B>& arguments, const Row<B>& row, int slot) const {
    const BackwardRow<B> inputs(arguments, row);  // only its addresses are used
    dy.copy(inputs.dy, row, slot);
    x.copy(inputs.x, row, slot);
    gate.copy(inputs.gate, row, slot);
    dresidual_out.copy(inputs.dresidual_out, row, slot);
    branch.copy(inputs.branch, row, slot);
    async_commit();
  }

  // Waits until the slot whose copies were started first is complete, and takes its row.
  __device__ void take(BackwardRow<B>& inputs, const Row<B>& row, int slot) const {
    async_wait<B::stages - 1>();
    dy.take(inputs.dy, row, slot);
    x.take(inputs.x, row, slot);
    gate.take(inputs.gate, row, slot);
    dresidual_out.take(inputs.dresidual_out, row, slot);
    branch.take(inputs.branch, row, slot);
    if constexpr (B::scalar_gate) inputs.gate.load(row.columns());
  }
};

// Processes held rows. `place` says where a row lies, and which columns are the thread's. A thread
// holds its packs of all operands in registers, and recent sums of their columns. It waits for the
// other threads of its team once per row, in `find_factors`.
template <class B>
__device__ inline void differentiate_held(const Arguments<B>& arguments, Team<B>& team,
                                          const Walk<B>& walk) {
  SharedMemory memory;
  const StagedRows<B> staged(memory);
  ParamSums<B> sums(arguments, walk, memory);
  Parameters<B> shared(arguments, walk.share, walk.share.row_index(0));
  RowScalars<B> next_scalars;
  int slot = 0;

  // Load the parameters once, and start to copy one row to each slot. Rows beyond the last row have
  // no columns.
  if constexpr (!B::own_parameters) shared.load(walk.whole_row().columns());
  if constexpr (B::stages > 0) {
    for (int i = 0; i < B::stages; ++i) staged.copy(arguments, walk.row(i), i);
    next_scalars = RowScalars<B>::load(arguments, walk.row(0));
  }

  walk.for_each_row([&](const auto& place) {
    // Load the row: from its slot, to which a later row is then copied, or from memory.
    const auto columns = place.columns();
    BackwardRow<B> row(arguments, place);
    RowParameters<B> own(arguments, place);
    auto& parameters = own.parameters(shared);
    if constexpr (B::own_parameters) parameters.load(columns);
    if constexpr (B::stages > 0) {
      staged.take(row, place, slot);
      staged.copy(arguments, place.after(B::stages), slot);
      slot = slot + 1 < B::stages ? slot + 1 : 0;
      row.scalars = next_scalars;
      next_scalars = RowScalars<B>::load(arguments, place.after(1));
    } else {
      row.scalars = RowScalars<B>::load(arguments, place);
      row.load(columns);
      row.load_rest(columns);
    }

    // Reduce.
    ItemSums<B> row_sums[3];
    if constexpr (B::reduces)
      columns.for_each_pack([&](auto at) { row.add_to(row_sums, at, parameters); });

    // Reduce over the team, and find the factors.
    row.find_factors(arguments, team, row_sums);

    // Store. Gates are recomputed: two numbers per item would take too many registers.
    columns.for_each_pack([&](auto at) {
      sums.add(at, [&](auto&... to_sums) { row.write(at, row.gates(at), parameters, to_sums...); });
    });
    sums.end_row(walk);
  });
  sums.finish(walk);  // the teams of a block wait for each other
}

#include "row_norm_backward_streamed.cuh"

template <class B>
__device__ inline void differentiate(const Arguments<B>& arguments, Team<B>& team) {
  const auto share = [&] {
    if constexpr (SEGMENT_AXES > 0)
      return BlockShare(row_groups(arguments), Team<B>::blocks, arguments.segments);
    else
      return BlockShare(row_groups(arguments), Team<B>::blocks);
  }();
  const Walk<B> walk(team, share, arguments.rows, row_width(arguments));
  if constexpr (streamed<B>)
    differentiate_streamed(arguments, team, walk);
  else
    differentiate_held(arguments, team, walk);
}

extern "C" __global__ void __launch_bounds__(Build::threads, Build::blocks_per_sm) CLUSTER_LAUNCH
    row_norm_backward(const Arguments<Build> arguments) {
  if constexpr (Build::dweight || Build::dbias) launch_dependents();
  __shared__ Team<Build>::Scratch scratch;
  Team<Build> team(scratch);
  differentiate(arguments, team);
}
