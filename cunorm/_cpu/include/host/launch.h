// SPDX-License-Identifier: MIT
// Runs the blocks of the kernel KERNEL on `threads` cores. Appended to the kernel's source.
extern "C" void cunorm_launch(long long grid, int threads, const void* arguments) {
  const auto& typed = *static_cast<const Arguments<Build>*>(arguments);
  const auto run = [&](long long block) {
    blockIdx.x = static_cast<unsigned>(block);
    gridDim.x = static_cast<unsigned>(grid);
    KERNEL(typed);
    simd::finish_non_temporal_stores();
  };
  // Even a parallel region of one thread would cost more than a small kernel.
  if (threads == 1) {
    for (long long block = 0; block < grid; ++block) run(block);
    return;
  }
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long long block = 0; block < grid; ++block) run(block);
}
