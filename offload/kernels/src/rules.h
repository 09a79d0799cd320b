// The optimizers: what happens to one weight, given its gradient and its states. A rule is the constants of one step, worked
// out once, and `step`, which is written once for all vector widths: V is one of vec_*.h. In every rule a NaN in a new state makes the new weight NaN.
#pragma once

#include <cstddef>

#include "arrays.h"

namespace offload {

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

  template <class V, class F32 = typename V::F32>
  [[gnu::always_inline]] F32 step(F32 weight, F32 grad, F32 (&states)[kStatesMax]) const {
    grad = V::mul(grad, V::set(grad_scale));
    if constexpr (!decoupled) grad = V::fma(V::set(decay), weight, grad);
    states[0] = V::fma(V::set(one_minus_beta1), V::sub(grad, states[0]), states[0]);
    states[1] = V::fma(V::set(beta2), states[1], V::mul(V::mul(V::set(one_minus_beta2), grad), grad));
    F32 second = states[1];
    if constexpr (amsgrad) second = states[2] = V::max(states[2], second);
    const F32 denominator = V::fma(V::sqrt(second), V::set(root_correction2), V::set(eps));
    if constexpr (decoupled) weight = V::mul(V::set(decay), weight);
    return V::fma(V::set(minus_step_size), V::div(states[0], denominator), weight);
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

  template <class V, class F32 = typename V::F32>
  [[gnu::always_inline]] F32 step(F32 weight, F32 grad, F32 (&states)[kStatesMax]) const {
    grad = V::fma(V::set(decay), weight, V::mul(grad, V::set(grad_scale)));
    states[0] = V::fma(grad, grad, states[0]);
    const F32 denominator = V::add(V::sqrt(states[0]), V::set(eps));
    return V::fma(V::set(minus_step_size), V::div(grad, denominator), weight);
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

  template <class V, class F32 = typename V::F32>
  [[gnu::always_inline]] F32 step(F32 weight, F32 grad, F32 (&states)[kStatesMax]) const {
    const F32 change = V::sub(V::mul(grad, V::set(grad_scale)), states[0]);
    const F32 direction = V::sign(V::fma(V::set(one_minus_beta1), change, states[0]));
    states[0] = V::fma(V::set(one_minus_beta2), change, states[0]);
    return V::fma(V::set(minus_lr), direction, V::mul(V::set(decay), weight));
  }
};

// torch.optim.SGD without momentum. No state.
struct Sgd {
  static constexpr std::size_t num_states = 0;
  static constexpr bool state_signed[] = {false};

  float grad_scale;
  float decay;  // weight_decay, added to the gradient
  float minus_lr;

  template <class V, class F32 = typename V::F32>
  [[gnu::always_inline]] F32 step(F32 weight, F32 grad, F32 (&)[kStatesMax]) const {
    grad = V::fma(V::set(decay), weight, V::mul(grad, V::set(grad_scale)));
    return V::fma(V::set(minus_lr), grad, weight);
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

  template <class V, class F32 = typename V::F32>
  [[gnu::always_inline]] F32 step(F32 weight, F32 grad, F32 (&states)[kStatesMax]) const {
    grad = V::fma(V::set(decay), weight, V::mul(grad, V::set(grad_scale)));
    states[0] = V::fma(V::set(momentum), states[0], V::mul(V::set(gain), grad));
    const F32 direction = nesterov ? V::fma(V::set(momentum), states[0], grad) : states[0];
    return V::fma(V::set(minus_lr), direction, weight);
  }
};

}  // namespace offload
