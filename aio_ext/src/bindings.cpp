// The thin face of the core: convert, release the GIL where a call can wait, raise.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "queue.h"
#include "without_gil.h"

namespace py = pybind11;
using namespace std::chrono_literals;

namespace {

using aio::Channel;
using aio::Fault;
using aio::FaultPlan;
using aio::Mapping;
using aio::Operation;
using aio::Priority;
using aio::Queue;
using aio::Ticket;

// Waits go in slices, so that Ctrl-C is noticed even by a thread that the signal does not wake.
constexpr std::chrono::nanoseconds kSlice = 100ms;

std::byte* pointer(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

std::chrono::nanoseconds duration(double seconds) {
  constexpr double kSecondsMax = 1e9;  // some thirty years: as good as for ever, and no overflow
  if (std::isnan(seconds) || seconds < 0) throw std::invalid_argument("timeout must be >= 0 seconds");
  return std::chrono::nanoseconds(static_cast<std::int64_t>(std::min(seconds, kSecondsMax) * 1e9));
}

template <typename Object>
void refuse_in_child(const Object& object) {
  if (object.forked()) {
    throw std::runtime_error("this queue belongs to the process that made it: a forked child must make its own");
  }
}

void check_signals() {
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

bool wait(const Ticket& ticket, std::optional<double> timeout) {
  refuse_in_child(ticket);
  const auto left_at_start = timeout ? duration(*timeout) : std::chrono::nanoseconds::max();
  if (ticket.done()) return true;
  const auto start = aio::Clock::now();
  for (;;) {
    const auto passed = aio::Clock::now() - start;
    if (passed >= left_at_start) return ticket.done();
    {
      const aio::WithoutGil release;
      if (ticket.wait_for(std::min<std::chrono::nanoseconds>(kSlice, left_at_start - passed))) break;
    }
    check_signals();
  }
  return true;
}

// Submission does not wait for I/O, so it keeps the GIL; only a full queue waits, and that without it.
Ticket submit(Queue& queue, Operation operation, std::int32_t file, std::uint64_t offset, std::uintptr_t address,
              std::uint64_t nbytes, bool urgent) {
  refuse_in_child(queue);
  const Priority priority = urgent ? Priority::urgent : Priority::background;
  for (;;) {
    if (auto ticket = queue.submit(operation, file, offset, pointer(address), nbytes, priority)) return std::move(*ticket);
    {
      const aio::WithoutGil release;
      queue.wait_for_room(kSlice);
    }
    check_signals();
  }
}

// Ctrl-C ends the wait; the queue then accepts nothing more, and can be closed again.
bool close_queue(Queue& queue, double timeout) {
  if (queue.forked()) return true;
  const auto deadline = aio::Clock::now() + duration(timeout);
  for (;;) {
    {
      const aio::WithoutGil release;
      const auto left = deadline - aio::Clock::now();
      if (left <= kSlice || queue.drain(kSlice)) return queue.close(std::max(left, std::chrono::nanoseconds::zero()));
    }
    check_signals();
  }
}

py::dict direction(const aio::DirectionCounters& c) {
  using namespace pybind11::literals;
  return py::dict("bytes"_a = c.bytes, "requests"_a = c.requests, "operations"_a = c.operations,
                  "latency_p50_s"_a = c.latency.quantile(0.5), "latency_p90_s"_a = c.latency.quantile(0.9),
                  "latency_p99_s"_a = c.latency.quantile(0.99), "latency_max_s"_a = c.latency.quantile(1.0));
}

py::dict counters(Queue& queue) {
  using namespace pybind11::literals;
  refuse_in_child(queue);
  const aio::Counters c = queue.counters();
  return py::dict("read"_a = direction(c.read), "write"_a = direction(c.write), "syncs"_a = c.syncs,
                  "failed_requests"_a = c.failed_requests, "retries"_a = c.retries,
                  "short_transfers"_a = c.short_transfers, "depth_max"_a = c.depth_max,
                  "depth_mean"_a = c.busy_seconds > 0 ? c.depth_seconds / c.busy_seconds : 0.0,
                  "busy_seconds"_a = c.busy_seconds, "starved_seconds"_a = c.starved_seconds,
                  "idle_seconds"_a = c.idle_seconds);
}

aio::Backend backend_named(const std::string& name) {
  if (name == "auto") return aio::Backend::automatic;
  if (name == "io_uring") return aio::Backend::io_uring;
  if (name == "threads") return aio::Backend::threads;
  throw std::invalid_argument("backend must be \"auto\", \"io_uring\" or \"threads\", got \"" + name + "\"");
}

std::unique_ptr<Queue> make_queue(const std::string& backend, std::uint32_t depth, std::uint32_t block_bytes,
                                  unsigned num_threads, std::shared_ptr<FaultPlan> plan) {
  aio::Options options;
  options.backend = backend_named(backend);
  options.limits.depth = depth;
  options.limits.block_bytes = block_bytes;
  options.num_threads = num_threads;
  const aio::WithoutGil release;
  return std::make_unique<Queue>(options, std::move(plan));
}

// A lease in the hands of Python. Closing it twice is fine; the pages go when the last request lets go, too.
struct Lease {
  std::shared_ptr<Mapping> mapping;

  const std::shared_ptr<Mapping>& open() const {
    if (!mapping) throw std::invalid_argument("the memory is closed");
    return mapping;
  }
};

// Waits without the GIL, which the last lease of a big range takes a while to give its pages back.
void close_lease(Lease& lease) {
  const aio::WithoutGil release;
  lease.mapping.reset();
}

void raise_os_error(const std::system_error& error) {
  PyErr_SetObject(PyExc_OSError, py::make_tuple(error.code().value(), error.what()).ptr());
}

}  // namespace

PYBIND11_MODULE(_aio, m) {
  m.doc() = "The native core of aio_ext. Use it through the package.";
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const std::system_error& error) {
      raise_os_error(error);
    }
  });

  py::class_<Lease>(m, "Lease")
      .def_property_readonly("address", [](const Lease& l) { return reinterpret_cast<std::uintptr_t>(l.open()->data()); })
      .def_property_readonly("nbytes", [](const Lease& l) { return l.open()->nbytes(); })
      .def("populate", [](const Lease& l) { l.open()->populate(); }, py::call_guard<aio::WithoutGil>())
      .def("close", &close_lease);
  m.def("anonymous_memory", [](std::size_t n, bool huge) { return Lease{Mapping::anonymous(n, huge)}; }, py::arg("nbytes"),
        py::arg("huge_pages"));
  m.def("pattern_memory", [](std::size_t n, std::uint16_t value) { return Lease{Mapping::pattern(n, value)}; },
        py::arg("nbytes"), py::arg("value"));

  m.def("lease_containing", [](std::uintptr_t address, std::size_t nbytes) -> std::optional<Lease> {
    if (auto mapping = Mapping::containing(pointer(address), nbytes)) return Lease{std::move(mapping)};
    return std::nullopt;
  });

  py::class_<Channel, std::shared_ptr<Channel>>(m, "Channel")
      .def(py::init<>())
      .def_property_readonly("fd", &Channel::fd)
      .def("post", &Channel::post)
      .def("drain", &Channel::drain);

  py::class_<Ticket>(m, "Ticket")
      .def("done", &Ticket::done)
      .def("wait", &wait, py::arg("timeout"))
      .def("watch", [](const Ticket& t, std::shared_ptr<Channel> channel, std::uint64_t token) {
        refuse_in_child(t);
        return t.watch(std::move(channel), token);
      })
      .def_property_readonly("bytes_done", &Ticket::bytes_done)
      .def_property_readonly("error", [](const Ticket& t) { return t.done() ? t.error() : 0; })
      .def_property_readonly("error_offset", [](const Ticket& t) { return t.done() ? t.error_offset() : 0; });

  py::class_<FaultPlan, std::shared_ptr<FaultPlan>>(m, "FaultPlan")
      .def(py::init<>())
      .def("strike", [](FaultPlan& plan, std::uint64_t nth, int error, std::uint32_t short_by, std::uint32_t delay_us,
                        bool hold) { plan.strike(nth, Fault{error, short_by, delay_us, hold}); })
      .def("strike_range", [](FaultPlan& plan, std::uint64_t begin, std::uint64_t end, int error, std::uint32_t short_by,
                              std::uint32_t delay_us, bool hold) {
        plan.strike_range(begin, end, Fault{error, short_by, delay_us, hold});
      })
      .def("strike_at_random", [](FaultPlan& plan, std::uint64_t seed, double error, std::vector<int> errors,
                                  double shortfall, double delay, std::uint32_t delay_us_max) {
        plan.strike_at_random(seed, {error, std::move(errors), shortfall, delay, delay_us_max});
      })
      .def("next", [](FaultPlan& plan, int operation, std::int32_t file, std::uint64_t offset, std::uint32_t nbytes) {
        const Fault fault = plan.next({static_cast<Operation>(operation), file, offset, nbytes});
        return py::make_tuple(fault.error, fault.short_by, fault.delay_us, fault.hold);
      })
      .def("release", &FaultPlan::release)
      .def_property_readonly("released", &FaultPlan::released)
      .def("keep_log", &FaultPlan::keep_log)
      .def("log", [](const FaultPlan& plan) {
        py::list attempts;
        for (const FaultPlan::Attempt& a : plan.log()) {
          attempts.append(py::make_tuple(static_cast<int>(a.operation), a.file, a.offset, a.nbytes));
        }
        return attempts;
      });

  py::class_<Queue>(m, "Queue")
      .def(py::init(&make_queue), py::arg("backend"), py::arg("depth"), py::arg("block_bytes"), py::arg("num_threads"),
           py::arg("plan"))
      .def_property_readonly("backend", [](const Queue& q) { return q.backend() == aio::Backend::io_uring ? "io_uring" : "threads"; })
      .def_property_readonly("notes", &Queue::notes)
      .def("register_file", [](Queue& q, int fd) {
        refuse_in_child(q);
        const aio::WithoutGil release;
        return q.register_file(fd);
      })
      .def("unregister_file", [](Queue& q, std::int32_t file) {
        refuse_in_child(q);
        const aio::WithoutGil release;
        q.unregister_file(file);
      })
      .def("register_memory", [](Queue& q, std::uintptr_t address, std::size_t nbytes) {
        refuse_in_child(q);
        const aio::WithoutGil release;
        q.register_memory(pointer(address), nbytes);
      })
      .def("read", [](Queue& q, std::int32_t file, std::uint64_t offset, std::uintptr_t address, std::uint64_t nbytes,
                      bool urgent) { return submit(q, Operation::read, file, offset, address, nbytes, urgent); })
      .def("write", [](Queue& q, std::int32_t file, std::uint64_t offset, std::uintptr_t address, std::uint64_t nbytes,
                       bool urgent) { return submit(q, Operation::write, file, offset, address, nbytes, urgent); })
      .def("sync", [](Queue& q, std::int32_t file) { return submit(q, Operation::sync, file, 0, 0, 0, true); })
      .def_property_readonly("blocks_in_flight", [](Queue& q) {
        refuse_in_child(q);
        return q.blocks_in_flight();
      })
      .def("counters", &counters)
      .def("cancel", [](Queue& q) {
        refuse_in_child(q);
        q.cancel();
      })
      .def("close", &close_queue, py::arg("timeout"));

  m.def("uring_obstacle", &aio::uring_obstacle, py::call_guard<aio::WithoutGil>());
  m.def("direct_io_alignment", [](int fd) {
    const aio::Alignment alignment = aio::direct_io_alignment(fd);
    return py::make_tuple(alignment.memory, alignment.offset);
  });
}
