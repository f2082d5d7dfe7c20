// SPDX-License-Identifier: MIT
// Signal handlers for the time of a launch, so that a kernel that faults does not end the process.
#pragma once
#include <pthread.h>

#include <csignal>

// Hands SIGSEGV and its like to `claim`, on a stack of its own, as the fiber's may be used up.
// `claim` leaves the faulting code for good, or returns: the fault was not the kernel's, and goes
// to the handlers that were there before.
class SignalGuard {
 public:
  using Claim = void (*)(int signal, void* address);

  explicit SignalGuard(Claim claim) : thread_(pthread_self()), claim_(claim) {
    current_ = this;
    stack_t stack = {};
    stack.ss_sp = handler_stack_;
    stack.ss_size = sizeof(handler_stack_);
    sigaltstack(&stack, &stack_before_);
    struct sigaction action = {};
    action.sa_sigaction = handle;
    // SA_NODEFER: nothing would unblock the signal again after a handler that does not return.
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < count_; ++i) sigaction(signals_[i], &action, &before_[i]);
  }
  ~SignalGuard() {
    restore_handlers();
    sigaltstack(&stack_before_, nullptr);
  }
  SignalGuard(const SignalGuard&) = delete;
  SignalGuard& operator=(const SignalGuard&) = delete;

 private:
  static constexpr int signals_[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL}, count_ = 4;
  static inline SignalGuard* current_;
  pthread_t thread_;
  Claim claim_;
  struct sigaction before_[count_] = {};
  stack_t stack_before_ = {};
  alignas(64) static inline char handler_stack_[64 << 10];

  static void handle(int signal, siginfo_t* info, void*) {
    if (pthread_equal(pthread_self(), current_->thread_)) current_->claim_(signal, info->si_addr);
    current_->restore_handlers();  // the instruction runs again and faults under them
  }
  void restore_handlers() {
    for (int i = 0; i < count_; ++i) sigaction(signals_[i], &before_[i], nullptr);
  }
};
