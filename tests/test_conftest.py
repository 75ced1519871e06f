import jax
import jax.numpy as jnp


def test_there_are_eight_cpu_devices():
    assert jax.default_backend() == "cpu"
    assert jax.device_count() == 8


def test_a_program_is_counted_once_and_again_for_a_new_shape(compile_counter):
    double = jax.jit(lambda x: jax.lax.add(x, x))
    short, long = jnp.ones(3), jnp.ones(4)
    compile_counter.reset()

    double(short)
    double(short)
    assert (compile_counter.traces, compile_counter.compiles) == (1, 1)

    double(long)
    assert (compile_counter.traces, compile_counter.compiles) == (2, 2)


def test_the_counter_tells_which_program_it_was(compile_counter):
    def invert(x):
        return jax.lax.integer_pow(x, -1)

    x = jnp.ones(3)
    compile_counter.reset()
    jax.jit(invert)(x)

    assert compile_counter.traced[-1] == "invert"
    assert compile_counter.compiled == ["jit(invert)"]
