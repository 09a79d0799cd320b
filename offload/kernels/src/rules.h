// The optimizers: what happens to one weight, given its gradient and its states. A rule is the constants of one step, worked
// out once, and two halves, written once for all vector widths: V is one of vec_*.h. `advance` brings states, gradient and
// weight as far as they come without square root and division; `apply` returns the new weight. (Both take long: sweeps overlap
// one vector's `apply` with the next one's `advance`.) In every rule a NaN in a new state makes the new weight NaN. At the end
// stands the list of the kernels, by name. What a rule owes to Python is in offload/native_optimizers.py, and nowhere else.
#pragma once

#include <cstddef>

#include "arrays.h"

namespace offload {

template <class V>
struct Operands {
  typename V::F32 weight, grad, states[kStatesMax];
};

// Kingma & Ba, arXiv:1412.6980; decoupled decay: Loshchilov & Hutter, arXiv:1711.05101; amsgrad: Reddi et al.,
// arXiv:1904.09237. States: exp_avg, exp_avg_sq, and with amsgrad max_exp_avg_sq.
template <bool amsgrad, bool decoupled>
struct Adam {
  static constexpr std::size_t num_states = amsgrad ? 3 : 2;
  static constexpr bool state_signed[] = {true, false, false};

  float grad_scale;        // unscale times clip factor, negative to maximize
  float decay;             // decoupled: 1 - lr * weight_decay, times the weight; else weight_decay, added to the gradient
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float root_correction2;  // 1 / sqrt(1 - beta2^step)
  float eps;
  float minus_step_size;   // -lr / (1 - beta1^step)

  template <class V>
  [[gnu::always_inline]] void advance(Operands<V>& x) const {
    auto grad = V::mul(x.grad, V::set(grad_scale));
    if constexpr (!decoupled) grad = V::fma(V::set(decay), x.weight, grad);
    x.states[0] = V::fma(V::set(one_minus_beta1), V::sub(grad, x.states[0]), x.states[0]);
    x.states[1] = V::fma(V::set(beta2), x.states[1], V::mul(V::mul(V::set(one_minus_beta2), grad), grad));
    if constexpr (amsgrad) x.states[2] = V::max(x.states[2], x.states[1]);
    x.grad = V::fma(V::sqrt(x.states[amsgrad ? 2 : 1]), V::set(root_correction2), V::set(eps));  // the denominator
  }

  template <class V>
  [[gnu::always_inline]] auto apply(const Operands<V>& x) const {
    const auto weight = decoupled ? V::mul(V::set(decay), x.weight) : x.weight;
    return V::fma(V::set(minus_step_size), V::div(x.states[0], x.grad), weight);
  }
};

// Duchi et al. 2011, as in torch.optim.Adagrad. State: sum.
struct Adagrad {
  static constexpr std::size_t num_states = 1;
  static constexpr bool state_signed[] = {false};

  float grad_scale;
  float decay;  // weight_decay, added to the gradient
  float eps;
  float minus_step_size;  // -lr / (1 + (step - 1) * lr_decay)

  template <class V>
  [[gnu::always_inline]] void advance(Operands<V>& x) const {
    x.grad = V::fma(V::set(decay), x.weight, V::mul(x.grad, V::set(grad_scale)));
    x.states[0] = V::fma(x.grad, x.grad, x.states[0]);
  }

  template <class V>
  [[gnu::always_inline]] auto apply(const Operands<V>& x) const {
    const auto denominator = V::add(V::sqrt(x.states[0]), V::set(eps));
    return V::fma(V::set(minus_step_size), V::div(x.grad, denominator), x.weight);
  }
};

// Chen et al., arXiv:2302.06675, Alg. 2. State: exp_avg.
struct Lion {
  static constexpr std::size_t num_states = 1;
  static constexpr bool state_signed[] = {true};

  float grad_scale;
  float decay;  // 1 - lr * weight_decay, times the weight
  float one_minus_beta1;
  float one_minus_beta2;
  float minus_lr;

  template <class V>
  [[gnu::always_inline]] void advance(Operands<V>& x) const {
    const auto change = V::sub(V::mul(x.grad, V::set(grad_scale)), x.states[0]);
    x.grad = V::sign(V::fma(V::set(one_minus_beta1), change, x.states[0]));
    x.states[0] = V::fma(V::set(one_minus_beta2), change, x.states[0]);
  }

  template <class V>
  [[gnu::always_inline]] auto apply(const Operands<V>& x) const {
    return V::fma(V::set(minus_lr), x.grad, V::mul(V::set(decay), x.weight));
  }
};

// torch.optim.SGD without momentum. No state.
struct Sgd {
  static constexpr std::size_t num_states = 0;
  static constexpr bool state_signed[] = {false};

  float grad_scale;
  float decay;  // weight_decay, added to the gradient
  float minus_lr;

  template <class V>
  [[gnu::always_inline]] void advance(Operands<V>& x) const {
    x.grad = V::fma(V::set(decay), x.weight, V::mul(x.grad, V::set(grad_scale)));
  }

  template <class V>
  [[gnu::always_inline]] auto apply(const Operands<V>& x) const {
    return V::fma(V::set(minus_lr), x.grad, x.weight);
  }
};

// torch.optim.SGD with momentum: Sutskever et al. 2013. State: momentum_buffer, zero before step 1.
template <bool nesterov>
struct SgdMomentum {
  static constexpr std::size_t num_states = 1;
  static constexpr bool state_signed[] = {true};

  float grad_scale;
  float decay;  // weight_decay, added to the gradient
  float momentum;
  float gain;  // 1 - dampening; 1 in step 1
  float minus_lr;

  template <class V>
  [[gnu::always_inline]] void advance(Operands<V>& x) const {
    const auto grad = V::fma(V::set(decay), x.weight, V::mul(x.grad, V::set(grad_scale)));
    x.states[0] = V::fma(V::set(momentum), x.states[0], V::mul(V::set(gain), grad));
    x.grad = nesterov ? V::fma(V::set(momentum), x.states[0], grad) : x.states[0];
  }

  template <class V>
  [[gnu::always_inline]] auto apply(const Operands<V>& x) const {
    return V::fma(V::set(minus_lr), x.grad, x.weight);
  }
};

// The kernels: RULE(name, type). The table of each instruction set, the functions of the Python module and the types that programs
// of GPUs are compiled for are made of this list.
#define OFFLOAD_RULES(RULE)              \
  RULE(adamw, Adam<false, true>)         \
  RULE(adamw_amsgrad, Adam<true, true>)  \
  RULE(adam, Adam<false, false>)         \
  RULE(adam_amsgrad, Adam<true, false>)  \
  RULE(adagrad, Adagrad)                 \
  RULE(lion, Lion)                       \
  RULE(sgd, Sgd)                         \
  RULE(sgd_momentum, SgdMomentum<false>) \
  RULE(sgd_nesterov, SgdMomentum<true>)

namespace rules {
#define OFFLOAD_RULE_TYPE(name, ...) using name = __VA_ARGS__;
OFFLOAD_RULES(OFFLOAD_RULE_TYPE)
#undef OFFLOAD_RULE_TYPE
}  // namespace rules

}  // namespace offload
