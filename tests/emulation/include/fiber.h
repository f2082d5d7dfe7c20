// SPDX-License-Identifier: MIT
// Fibers: stacks of their own for up to 8192 CUDA threads, and the switch from one to another.
//
// A switch on x86-64 saves the registers that a function call must preserve: a few nanoseconds.
// Elsewhere, or with EMULATION_UCONTEXT, it is swapcontext, which also asks the kernel for the
// signal mask: some hundred nanoseconds.
#pragma once
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__) && !defined(EMULATION_UCONTEXT)

struct Context {
  void* stack_pointer;
};

extern "C" void emulation_switch(void** saved_stack_pointer, void* next_stack_pointer);
asm(R"(
.pushsection .text
.type emulation_switch, @function
emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulation_switch, . - emulation_switch
.popsection
)");

inline void switch_context(Context& from, const Context& to) {
  emulation_switch(&from.stack_pointer, to.stack_pointer);
}

// The next switch to the context calls entry(), which must not return.
inline void start_context(Context& context, char* stack, std::size_t size, void (*entry)()) {
  auto top = reinterpret_cast<std::uintptr_t>(stack + size) & ~std::uintptr_t(15);
  void** frame = reinterpret_cast<void**>(top) - 8;  // six registers, entry, its return address
  for (int i = 0; i < 8; ++i) frame[i] = nullptr;
  frame[6] = reinterpret_cast<void*>(entry);
  context.stack_pointer = frame;
}

#else

using Context = ucontext_t;

inline void switch_context(Context& from, const Context& to) { swapcontext(&from, &to); }

inline void start_context(Context& context, char* stack, std::size_t size, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = size;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}

#endif

// The fibers' stacks, made accessible as they are asked for and kept. Below each lies a page
// without access, so that an overflow faults instead of running into the neighbour.
class Stacks {
 public:
  static constexpr int max_count = 16 * 512;
  static constexpr std::size_t size = 64 << 10;

  // Makes the first `count` stacks accessible.
  bool map(int count) {
    if (memory_ == nullptr) {
      void* memory = mmap(nullptr, max_count * stride_, PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) return false;
      memory_ = static_cast<char*>(memory);
    }
    for (; mapped_ < count; ++mapped_)
      if (mprotect((*this)[mapped_], size, PROT_READ | PROT_WRITE) != 0) return false;
    return true;
  }

  char* operator[](int i) const { return memory_ + i * stride_ + page_; }

  bool in_guard_page(const void* address) const {
    const auto offset = static_cast<std::size_t>(static_cast<const char*>(address) - memory_);
    return offset < max_count * stride_ && offset % stride_ < page_;
  }

 private:
  const std::size_t page_ = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t stride_ = page_ + size;
  char* memory_ = nullptr;
  int mapped_ = 0;
};
