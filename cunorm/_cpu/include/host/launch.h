// SPDX-License-Identifier: MIT
// Runs the blocks of the kernel KERNEL on `threads` cores. Appended to the kernel's source.
extern "C" void cunorm_launch(long long grid, int threads, const void* arguments) {
  const auto& typed = *static_cast<const Arguments<Build>*>(arguments);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (long long block = 0; block < grid; ++block) {
    blockIdx.x = static_cast<unsigned>(block);
    gridDim.x = static_cast<unsigned>(grid);
    KERNEL(typed);
    simd::finish_non_temporal_stores();
  }
}
