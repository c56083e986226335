// Runs a kernel, and policy_loss's second kernel, block after block. SOURCE: the kernel's file.
#include SOURCE

extern "C" void readable(const void* begin, i64 bytes) {
  const char* at = static_cast<const char*>(begin);
  emulated::readable.push_back({at, at + bytes});
}

#ifdef NORM
extern "C" void launch(const Arguments* a, int blocks, int threads, int, int, u32 seed) {
  emulated::chance = seed;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) emulated::run_block(threads, [&] { rlk_rms_norm_grad(*a); });
  emulated::readable.clear();
}
#else
extern "C" void launch(const Arguments* a, int blocks, int threads, int last_blocks, int last_threads, u32 seed) {
  emulated::chance = seed;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
    emulated::run_block(threads, [&] { rlk_policy_loss_tokens(*a); });
  for (blockIdx.x = last_blocks - 1; blockIdx.x >= 0; --blockIdx.x)
    emulated::run_block(last_threads, [&] { rlk_policy_loss_batch(*a); });
  emulated::readable.clear();
}
#endif
