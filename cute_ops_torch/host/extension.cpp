// The host side of every op in C++: look the call's signature up, allocate, call the compiled function; and autograd.
//
// Nothing here is written for one op. Python sends a table per op (`Op` below, made by extension.py from the
// declaration) and, for a signature that was not seen before, a plan (`Entry`): planning, compiling and all checks stay
// in Python. One boxed kernel serves the device's dispatch key, one the Autograd keys; the functions that Python calls
// go past the dispatcher where nothing listens to it.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <dlpack/dlpack.h>
#include <tvm/ffi/c_api.h>

#include <mutex>
#include <shared_mutex>
#include <unordered_map>

namespace py = pybind11;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using NodePtr = decltype(std::declval<Node>().getptr());  // shared or intrusive, by torch's version

namespace {

constexpr size_t kMostTensors = 32;
constexpr size_t kRemembered = 4096;  // signatures per op; then all are forgotten, which costs planning, no compile

// What a compiled function needs of TVM-FFI; the library is loaded by Python when it loads the first kernel.
struct Runtime {
  int (*set_stream)(int32_t, int32_t, void*, void**) = nullptr;
  void (*take_error)(TVMFFIObjectHandle*) = nullptr;
  int (*release)(TVMFFIObjectHandle) = nullptr;
} runtime;

// A reference to a Python object that any thread may drop.
using Shared = std::shared_ptr<PyObject>;
Shared share(py::handle object) {
  return Shared(object.inc_ref().ptr(), [](PyObject* p) {
    if (Py_IsInitialized()) {
      py::gil_scoped_acquire gil;
      Py_DECREF(p);
    }
  });
}

struct Shape {
  std::vector<int64_t> size, stride;
};

// A tensor that a call makes.
struct New {
  Shape shape;
  at::ScalarType dtype;
};

// One argument of the compiled function.
struct Argument {
  enum Kind { input, output, scratch } kind;
  size_t index;
  bool viewed;  // passed with the shape below instead of its own
  Shape shape;
};

// How a call of one signature runs.
struct Entry {
  std::vector<int64_t> key;
  TVMFFIObjectHandle handle = nullptr;  // none where there is nothing to launch: then Python runs it
  TVMFFISafeCallType function = nullptr;
  std::vector<Argument> arguments;
  std::vector<New> outputs, scratch;
  Shared keep;
  Shared run;
};

// How an output of a raw op is understood: absent, or served for by another.
struct Output {
  int64_t given, same_as, mine, theirs;  // an input; an output; the inputs whose dtypes decide; -1 where not so
  bool hidden;                           // kept for the gradient, without one of its own
};

// Where a backward op's input comes from.
struct Source {
  enum Kind { input, output, cotangent } kind;
  size_t index;
  bool optional;
  bool rows;  // its last dim must be contiguous
};

struct Op {
  std::string name;
  size_t inputs, attributes;
  std::string kinds;  // of the attributes: f, i, b or s
  c10::DeviceType device;
  c10::DispatchKeySet plain;  // of tensors that nothing below autograd watches
  std::vector<Output> outputs;
  std::optional<c10::OperatorHandle> handle;
  // Python's: the op, planning, an error for tangents, one for gradients of ops that have none.
  Shared overload, prepare, refuse, describe, fail;
  // The gradient.
  Op* grad = nullptr;
  std::vector<Source> sources;
  std::vector<size_t> passed;   // attributes of this op that the backward op takes
  std::vector<int64_t> results;  // the backward op's output per input of this one, or -1

  std::shared_mutex mutex;
  std::unordered_map<uint64_t, std::vector<std::shared_ptr<Entry>>> entries;
  size_t count = 0;

  size_t arity() const { return inputs + attributes; }
};

using Tensors = c10::SmallVector<at::Tensor, 8>;  // undefined where absent
using Values = c10::SmallVector<c10::IValue, 4>;
using Key = c10::SmallVector<int64_t, 64>;

// All that planning looks at. Kernels are compiled for an alignment of at most 16 bytes.
Key key_of(const Tensors& inputs, const Values& values) {
  Key key;
  for (const auto& t : inputs) {
    if (!t.defined()) {
      key.push_back(-1);
      continue;
    }
    key.push_back(
        (reinterpret_cast<intptr_t>(t.unsafeGetTensorImpl()->data()) & 15) | int64_t(t.scalar_type()) << 8 |
        int64_t(t.device().type()) << 16 | int64_t(t.device().index() + 1) << 24 | int64_t(t.dim()) << 40);
    key.append(t.sizes().begin(), t.sizes().end());
    key.append(t.strides().begin(), t.strides().end());
  }
  for (const auto& value : values) {
    if (value.isDouble()) {
      int64_t bits;
      double number = value.toDouble();
      std::memcpy(&bits, &number, sizeof bits);
      key.push_back(bits);
    } else if (value.isString()) {
      const auto& text = value.toStringRef();
      key.push_back(int64_t(text.size()));
      key.append(text.begin(), text.end());
    } else {
      key.push_back(value.isBool() ? int64_t(value.toBool()) : value.toInt());
    }
  }
  return key;
}

uint64_t hash_of(const Key& key) {
  uint64_t hash = key.size();
  for (int64_t word : key) {
    hash = (hash ^ uint64_t(word)) * 0x9E3779B97F4A7C15ull;
    hash ^= hash >> 29;
  }
  return hash;
}

std::shared_ptr<Entry> find(Op& op, const Key& key, uint64_t hash) {
  std::shared_lock lock(op.mutex);
  auto found = op.entries.find(hash);
  if (found != op.entries.end()) {
    for (const auto& entry : found->second) {
      if (entry->key.size() == key.size() && std::equal(key.begin(), key.end(), entry->key.begin())) return entry;
    }
  }
  return nullptr;
}

// An attribute: what the JIT's own conversion knows besides takes a sixth of the build.
py::object to_python(const c10::IValue& value) {
  if (value.isDouble()) return py::float_(value.toDouble());
  if (value.isBool()) return py::bool_(value.toBool());
  if (value.isString()) return py::str(value.toStringRef());
  return py::int_(value.toInt());
}

py::tuple to_python(const Tensors& inputs, const Values& values) {
  py::tuple arguments(inputs.size() + values.size());
  size_t i = 0;
  for (const auto& t : inputs) {
    arguments[i++] = t.defined() ? py::reinterpret_steal<py::object>(THPVariable_Wrap(t)) : py::none();
  }
  for (const auto& value : values) arguments[i++] = to_python(value);
  return arguments;
}

at::ScalarType dtype_of(py::handle object) { return reinterpret_cast<THPDtype*>(object.ptr())->scalar_type; }

New new_of(py::handle text) {
  auto made = text.cast<py::tuple>();
  return {{made[0].cast<std::vector<int64_t>>(), made[1].cast<std::vector<int64_t>>()}, dtype_of(made[2])};
}

void forget(Op& op) {
  op.entries.clear();
  op.count = 0;
}

// Asks Python for a plan and remembers it.
std::shared_ptr<Entry> plan(Op& op, const Tensors& inputs, const Values& values, const Key& key, uint64_t hash) {
  py::gil_scoped_acquire gil;
  auto made = py::reinterpret_borrow<py::object>(op.prepare.get())(*to_python(inputs, values)).cast<py::dict>();
  auto entry = std::make_shared<Entry>();
  entry->key.assign(key.begin(), key.end());
  entry->run = share(made["run"]);
  if (!made["handle"].is_none()) {
    entry->keep = share(made["function"]);
    entry->handle = reinterpret_cast<TVMFFIObjectHandle>(made["handle"].cast<uintptr_t>());
    entry->function = TVMFFIFunctionGetCellPtr(entry->handle)->safe_call;
    for (auto item : made["arguments"]) {
      auto part = item.cast<py::tuple>();
      Argument argument{Argument::Kind(part[0].cast<int>()), part[1].cast<size_t>(), !part[2].is_none(), {}};
      if (argument.viewed) {
        argument.shape = {part[2].cast<std::vector<int64_t>>(), part[3].cast<std::vector<int64_t>>()};
      }
      entry->arguments.push_back(std::move(argument));
    }
    for (auto item : made["outputs"]) entry->outputs.push_back(new_of(item));
    for (auto item : made["scratch"]) entry->scratch.push_back(new_of(item));
    TORCH_CHECK(entry->arguments.size() <= kMostTensors, op.name, ": more than ", kMostTensors, " tensors");
    auto address = made["runtime"].cast<std::vector<uintptr_t>>();
    runtime = {reinterpret_cast<decltype(runtime.set_stream)>(address[0]),
               reinterpret_cast<decltype(runtime.take_error)>(address[1]),
               reinterpret_cast<decltype(runtime.release)>(address[2])};
  }
  std::unique_lock lock(op.mutex);
  if (op.count >= kRemembered) forget(op);
  op.entries[hash].push_back(entry);
  ++op.count;
  return entry;
}

DLDataType dl_type(at::ScalarType dtype) {
  auto bits = uint8_t(8 * c10::elementSize(dtype));
  switch (dtype) {
    case at::kBFloat16: return {kDLBfloat, bits, 1};
    case at::kHalf: case at::kFloat: case at::kDouble: return {kDLFloat, bits, 1};
    case at::kBool: return {kDLBool, bits, 1};
    case at::kByte: return {kDLUInt, bits, 1};
    case at::kChar: case at::kShort: case at::kInt: case at::kLong: return {kDLInt, bits, 1};
    case at::kFloat8_e4m3fn: return {kDLFloat8_e4m3fn, bits, 1};
    case at::kFloat8_e5m2: return {kDLFloat8_e5m2, bits, 1};
    case at::kFloat8_e8m0fnu: return {kDLFloat8_e8m0fnu, bits, 1};
    default: TORCH_CHECK(false, "cute_ops_torch: dtype ", dtype, " is not known to TVM-FFI");
  }
}

[[noreturn]] void raise(const Op& op) {
  TVMFFIObjectHandle error = nullptr;
  runtime.take_error(&error);
  std::string text = "unknown error";
  if (error) {
    auto* cell = reinterpret_cast<TVMFFIErrorCell*>(static_cast<char*>(error) + sizeof(TVMFFIObject));
    text = std::string(cell->kind.data, cell->kind.size) + ": " + std::string(cell->message.data, cell->message.size);
    runtime.release(error);
  }
  throw std::runtime_error(op.name + ": the kernel failed: " + text);
}

at::Tensor make(const New& what, c10::Device device) {
  auto key = device.type() == c10::kCUDA ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  return at::_ops::empty_strided::redispatch(
      c10::DispatchKeySet(key), c10::fromIntArrayRefSlow(what.shape.size), c10::fromIntArrayRefSlow(what.shape.stride),
      what.dtype, c10::kStrided, device, false);
}

// Restores TVM-FFI's stream.
struct Stream {
  int32_t index;
  void* before = nullptr;
  explicit Stream(c10::Device device) : index(device.index()) {
    c10::impl::VirtualGuardImpl guard(device.type());
    runtime.set_stream(kDLCUDA, index, guard.getStream(device).native_handle(), &before);
  }
  ~Stream() { runtime.set_stream(kDLCUDA, index, before, nullptr); }
};

// Runs an op on tensors that nothing watches. Outputs that are not given are made.
void launch(Op& op, const Tensors& inputs, const Values& values, Tensors& outputs) {
  Key key = key_of(inputs, values);
  uint64_t hash = hash_of(key);
  auto entry = find(op, key, hash);
  if (!entry) entry = plan(op, inputs, values, key, hash);
  if (!entry->handle) {
    py::gil_scoped_acquire gil;
    py::tuple tensors = to_python(inputs, {});
    py::object made = py::reinterpret_borrow<py::object>(entry->run.get())(*tensors);
    if (!py::isinstance<py::tuple>(made)) made = py::make_tuple(made);
    size_t k = 0;
    for (auto item : made.cast<py::tuple>()) {
      const auto& value = THPVariable_Unpack(item.ptr());
      if (outputs[k].defined()) {
        outputs[k].copy_(value);
      } else {
        outputs[k] = value;
      }
      ++k;
    }
    return;
  }
  c10::Device device = c10::kCPU;
  for (const auto& t : inputs) {
    if (t.defined()) {
      device = t.device();
      break;
    }
  }
  c10::DeviceGuard on_device(device);
  for (size_t k = 0; k < outputs.size(); ++k) {
    if (!outputs[k].defined()) outputs[k] = make(entry->outputs[k], device);
  }
  Tensors scratch;
  for (const auto& what : entry->scratch) scratch.push_back(make(what, device));
  DLTensor tensors[kMostTensors];
  TVMFFIAny arguments[kMostTensors];
  size_t n = 0;
  DLDevice place{device.is_cuda() ? kDLCUDA : kDLCPU, device.is_cuda() ? device.index() : 0};
  for (const auto& argument : entry->arguments) {
    const auto& from = argument.kind == Argument::input ? inputs : argument.kind == Argument::output ? outputs : scratch;
    const at::Tensor& t = from[argument.index];
    const int64_t* size = argument.viewed ? argument.shape.size.data() : t.sizes().data();
    const int64_t* stride = argument.viewed ? argument.shape.stride.data() : t.strides().data();
    int32_t rank = argument.viewed ? int32_t(argument.shape.size.size()) : int32_t(t.dim());
    tensors[n] = {t.unsafeGetTensorImpl()->mutable_data(), place, rank, dl_type(t.scalar_type()),
                  const_cast<int64_t*>(size), const_cast<int64_t*>(stride), 0};
    arguments[n].type_index = kTVMFFIDLTensorPtr;
    arguments[n].zero_padding = 0;
    arguments[n].v_ptr = &tensors[n];
    ++n;
  }
  TVMFFIAny result{};
  std::optional<Stream> stream;
  if (device.is_cuda()) stream.emplace(device);
  if (entry->function(entry->handle, arguments, int32_t(n), &result)) raise(op);
}

// ------------------------------------------------------------------------------------------------------ who watches

bool plain(const Op& op, const Tensors& inputs) {
  for (const auto& t : inputs) {
    if (t.defined() && (t.device().type() != op.device || !(t.key_set() - op.plain).empty())) return false;
  }
  return true;
}

const c10::DispatchKeySet kHarmless =
    c10::DispatchKeySet({c10::DispatchKey::BackendSelect, c10::DispatchKey::ADInplaceOrView,
                         c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA});

// Nothing between a caller and an op of plain tensors: no mode, functorch level, trace or profiler.
bool unwatched() {
  return (c10::impl::tls_local_dispatch_key_set().included_ - kHarmless).empty() && !at::hasCallbacks();
}

bool has_tangent(const Tensors& inputs) {
  for (const auto& t : inputs) {
    if (t.defined() && t.unsafeGetTensorImpl()->autograd_meta() && t._fw_grad(0).defined()) return true;
  }
  return false;
}

bool needs_gradient(const Tensors& inputs) {
  if (!at::GradMode::is_enabled()) return false;
  for (const auto& t : inputs) {
    if (t.defined() && t.requires_grad()) return true;
  }
  return false;
}

// What stands for a raw output: none, another, itself.
int64_t resolve(const Output& output, size_t index, const Tensors& inputs) {
  if (output.given >= 0 && !inputs[output.given].defined()) return -1;
  if (output.same_as >= 0 && inputs[output.mine].scalar_type() == inputs[output.theirs].scalar_type()) {
    return output.same_as;
  }
  return int64_t(index);
}

// --------------------------------------------------------------------------------------------------------- autograd

void call_boxed(Op& op, const Tensors& inputs, const Values& values, Tensors& outputs) {
  torch::jit::Stack stack;
  for (const auto& t : inputs) stack.push_back(t.defined() ? c10::IValue(t) : c10::IValue());
  for (const auto& value : values) stack.push_back(value);
  op.handle->callBoxed(&stack);
  outputs.clear();
  for (auto& value : stack) outputs.push_back(value.toTensor());
}

// What a cotangent must look like where it is missing.
struct Like {
  c10::SymDimVector size;
  at::ScalarType dtype;
};

struct Gradient : Node {
  Op* op = nullptr;
  Values values;
  std::vector<std::optional<SavedVariable>> saved;  // per source; none for cotangents and absent inputs
  std::vector<Like> likes;                           // per output, where needed
  Shared given;                                      // of an op without gradient: for its error

  std::string name() const override { return "cute_" + op->name.substr(op->name.find("::") + 2) + "Backward"; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& variable : saved) {
      if (variable) variable->reset_data();
    }
  }

  variable_list apply(variable_list&& cotangents) override {
    std::lock_guard<std::mutex> lock(mutex_);
    variable_list gradients(op->inputs);
    if (!op->grad) {  // raises, unless a compiler traces this
      py::gil_scoped_acquire gil;
      py::tuple wanted(gradients.size());
      for (size_t i = 0; i < gradients.size(); ++i) wanted[i] = py::bool_(task_should_compute_output(i));
      auto fail = py::reinterpret_borrow<py::object>(op->fail.get());
      py::list found = fail(py::reinterpret_borrow<py::object>(given.get()),
                            to_python({cotangents.begin(), cotangents.end()}, {}), wanted);
      for (size_t i = 0; i < gradients.size(); ++i) {
        if (!found[i].is_none()) gradients[i] = THPVariable_Unpack(py::object(found[i]).ptr());
      }
      return gradients;
    }
    const at::Tensor* any = nullptr;
    for (const auto& d : cotangents) {
      if (d.defined()) any = &d;
    }
    if (!any) return gradients;
    auto self = getptr();
    Tensors inputs;
    for (size_t i = 0; i < op->sources.size(); ++i) {
      const auto& source = op->sources[i];
      if (source.kind != Source::cotangent) {
        inputs.push_back(saved[i] ? saved[i]->unpack(self) : at::Tensor());
        continue;
      }
      at::Tensor d = cotangents[source.index];
      if (!d.defined() && !source.optional) {
        d = any->new_zeros_symint(likes[source.index].size, any->options().dtype(likes[source.index].dtype));
      }
      // Kernels read rows; the caller never chose a cotangent's strides: `sum` makes expanded ones.
      if (d.defined() && source.rows && d.dim() && d.sym_strides().back() != 1) d = d.contiguous();
      inputs.push_back(std::move(d));
    }
    Op& grad = *op->grad;
    Tensors results(grad.outputs.size());
    if (!at::GradMode::is_enabled() && plain(grad, inputs) && unwatched() && !has_tangent(inputs)) {
      launch(grad, inputs, values, results);
    } else {
      call_boxed(grad, inputs, values, results);
    }
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (op->results[i] < 0) continue;
      auto index = resolve(grad.outputs[op->results[i]], op->results[i], inputs);
      if (index >= 0) gradients[i] = results[index];
    }
    return gradients;
  }
};

template <class T>
auto make_node() {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<Node>>) {
    return std::shared_ptr<T>(new T, [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<T>();
  }
}

// The node of a call, before it runs.
auto record(Op& op, const Tensors& inputs, const Values& values) {
  auto node = make_node<Gradient>();
  node->op = &op;
  variable_list variables(inputs.begin(), inputs.end());
  node->set_next_edges(torch::autograd::collect_next_edges(variables));
  if (!op.grad) {
    py::gil_scoped_acquire gil;
    node->given = share(py::reinterpret_borrow<py::object>(op.describe.get())(*to_python(inputs, {})));
    return node;
  }
  for (auto index : op.passed) node->values.push_back(values[index]);
  node->saved.resize(op.sources.size());
  for (size_t i = 0; i < op.sources.size(); ++i) {
    const auto& source = op.sources[i];
    if (source.kind == Source::input && inputs[source.index].defined()) {
      node->saved[i].emplace(inputs[source.index], false);
    }
  }
  return node;
}

// The same, after it ran.
template <class P>
void connect(Op& op, const P& node, const Tensors& inputs, Tensors& outputs) {
  NodePtr base = node;
  for (size_t k = 0; k < outputs.size(); ++k) {
    bool real = !op.outputs[k].hidden && resolve(op.outputs[k], k, inputs) == int64_t(k) &&
        torch::autograd::isDifferentiableType(outputs[k].scalar_type());
    torch::autograd::set_history(real ? outputs[k] : at::Tensor(), base);
  }
  if (!op.grad) return;
  for (size_t i = 0; i < op.sources.size(); ++i) {
    const auto& source = op.sources[i];
    if (source.kind == Source::output) node->saved[i].emplace(outputs[source.index], true);
    if (source.kind == Source::cotangent && !source.optional && outputs.size() > 1) {
      node->likes.resize(outputs.size());
      auto size = outputs[source.index].sym_sizes();
      node->likes[source.index] = {{size.begin(), size.end()}, outputs[source.index].scalar_type()};
    }
  }
}

// ------------------------------------------------------------------------------------------------- the two kernels

void take(Op& op, const torch::jit::Stack& stack, Tensors& inputs, Values& values) {
  auto arguments = torch::jit::last(stack, op.arity());
  for (size_t i = 0; i < op.inputs; ++i) {
    inputs.push_back(arguments[i].isTensor() ? arguments[i].toTensor() : at::Tensor());
  }
  for (size_t i = op.inputs; i < op.arity(); ++i) values.push_back(arguments[i]);
}

void give(Op& op, torch::jit::Stack* stack, Tensors& outputs) {
  torch::jit::drop(*stack, op.arity());
  for (auto& out : outputs) stack->emplace_back(std::move(out));
}

struct Device : c10::OperatorKernel {
  Op* op;
  explicit Device(Op* op) : op(op) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
    Tensors inputs, outputs(op->outputs.size());
    Values values;
    take(*op, *stack, inputs, values);
    launch(*op, inputs, values, outputs);
    give(*op, stack, outputs);
  }
};

[[noreturn]] void refuse(Op& op, const Tensors& inputs) {
  py::gil_scoped_acquire gil;
  py::reinterpret_borrow<py::object>(op.refuse.get())(*to_python(inputs, {}));
  throw std::runtime_error(op.name + ": forward-mode AD is not supported");
}

struct Autograd : c10::OperatorKernel {
  Op* op;
  explicit Autograd(Op* op) : op(op) {}
  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    Tensors inputs;
    Values values;
    take(*op, *stack, inputs, values);
    if (has_tangent(inputs)) refuse(*op, inputs);
    bool direct = (keys - op->plain).empty() && plain(*op, inputs);
    if (!needs_gradient(inputs)) {
      if (!direct) {
        at::AutoDispatchBelowAutograd below;
        handle.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
        return;
      }
      Tensors outputs(op->outputs.size());
      launch(*op, inputs, values, outputs);
      give(*op, stack, outputs);
      return;
    }
    auto node = record(*op, inputs, values);
    Tensors outputs(op->outputs.size());
    if (direct) {
      launch(*op, inputs, values, outputs);
      torch::jit::drop(*stack, op->arity());
    } else {
      at::AutoDispatchBelowAutograd below;
      handle.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
      for (size_t k = 0; k < outputs.size(); ++k) {
        outputs[k] = torch::jit::peek(*stack, k, outputs.size()).toTensor();
      }
      torch::jit::drop(*stack, outputs.size());
    }
    connect(*op, node, inputs, outputs);
    for (auto& out : outputs) stack->emplace_back(std::move(out));
  }
};

// -------------------------------------------------------------------------------------------- what Python calls

struct NoGil {
  PyThreadState* state = PyEval_SaveThread();
  ~NoGil() { PyEval_RestoreThread(state); }
};

bool read_attribute(char kind, PyObject* object, Values& values) {
  if (kind == 'f' && PyFloat_CheckExact(object)) {
    values.emplace_back(PyFloat_AS_DOUBLE(object));
  } else if (kind == 'i' && PyLong_CheckExact(object)) {
    values.emplace_back(int64_t(PyLong_AsLongLong(object)));
  } else if (kind == 'b' && PyBool_Check(object)) {
    values.emplace_back(object == Py_True);
  } else if (kind == 's' && PyUnicode_CheckExact(object)) {
    values.emplace_back(std::string(PyUnicode_AsUTF8(object)));
  } else {
    return false;
  }
  return true;
}

bool read(Op& op, PyObject* const* arguments, Tensors& inputs, Values& values) {
  for (size_t i = 0; i < op.inputs; ++i) {
    if (arguments[i] == Py_None) {
      inputs.emplace_back();
    } else if (THPVariable_CheckExact(arguments[i])) {
      inputs.push_back(THPVariable_Unpack(arguments[i]));
    } else {
      return false;
    }
  }
  for (size_t i = 0; i < op.attributes; ++i) {
    if (!read_attribute(op.kinds[i], arguments[op.inputs + i], values)) return false;
  }
  return true;
}

Op& self(PyObject* capsule) { return *static_cast<Op*>(PyCapsule_GetPointer(capsule, "cute_ops_torch.Op")); }

// call(*inputs, *attributes): the raw op, past the dispatcher where nothing listens to it.
PyObject* call(PyObject* capsule, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Op& op = self(capsule);
  try {
    Tensors inputs;
    Values values;
    if (size_t(count) != op.arity() || at::impl::torch_function_mode_enabled() ||
        !read(op, arguments, inputs, values) || !plain(op, inputs) || !unwatched() || has_tangent(inputs)) {
      return PyObject_Vectorcall(op.overload.get(), arguments, count, nullptr);
    }
    Tensors outputs(op.outputs.size());
    {
      NoGil released;
      if (needs_gradient(inputs) && (c10::impl::tls_local_dispatch_key_set().excluded_ & op.plain).empty()) {
        auto node = record(op, inputs, values);
        launch(op, inputs, values, outputs);
        connect(op, node, inputs, outputs);
      } else {
        launch(op, inputs, values, outputs);
      }
    }
    if (outputs.size() == 1) return THPVariable_Wrap(std::move(outputs[0]));
    PyObject* tuple = PyTuple_New(outputs.size());
    for (size_t k = 0; k < outputs.size(); ++k) PyTuple_SET_ITEM(tuple, k, THPVariable_Wrap(std::move(outputs[k])));
    return tuple;
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
  END_HANDLE_TH_ERRORS
}

// into(*inputs, *attributes, *outputs): fills given outputs; one that nobody wants is None.
PyObject* into(PyObject* capsule, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Op& op = self(capsule);
  try {
    Tensors inputs, outputs;
    Values values;
    if (size_t(count) != op.arity() + op.outputs.size() || !read(op, arguments, inputs, values)) {
      PyErr_Format(PyExc_TypeError, "%s: wrong arguments for its outputs", op.name.c_str());
      return nullptr;
    }
    for (size_t k = op.arity(); k < size_t(count); ++k) {
      outputs.push_back(arguments[k] == Py_None ? at::Tensor() : THPVariable_Unpack(arguments[k]));
    }
    NoGil released;
    launch(op, inputs, values, outputs);
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call)), METH_FASTCALL, nullptr},
    {"into", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(into)), METH_FASTCALL, nullptr}};

// Ops and registrations live as long as the process: nodes point to the former, the dispatcher to the latter.
std::vector<torch::Library*> libraries;

py::tuple define(const py::dict& table) {
  auto* op = new Op;
  op->name = table["name"].cast<std::string>();
  op->inputs = table["inputs"].cast<size_t>();
  op->kinds = table["kinds"].cast<std::string>();
  op->attributes = op->kinds.size();
  bool cuda = table["device"].cast<std::string>() == "cuda";
  op->device = cuda ? c10::kCUDA : c10::kCPU;
  op->plain = c10::DispatchKeySet({cuda ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU,
                                   cuda ? c10::DispatchKey::AutogradCUDA : c10::DispatchKey::AutogradCPU,
                                   c10::DispatchKey::ADInplaceOrView});
  for (auto item : table["outputs"]) {
    auto o = item.cast<std::array<int64_t, 5>>();
    op->outputs.push_back({o[0], o[1], o[2], o[3], o[4] != 0});
  }
  for (const char* part : {"overload", "prepare", "refuse", "describe", "fail"}) {
    auto& member = part == std::string("overload") ? op->overload : part == std::string("prepare") ? op->prepare
        : part == std::string("refuse") ? op->refuse : part == std::string("describe") ? op->describe : op->fail;
    member = share(table[part]);
  }
  op->handle = c10::Dispatcher::singleton().findSchemaOrThrow(op->name.c_str(), "");
  py::object grad = table["grad"];
  if (!grad.is_none()) {
    op->grad = &self(grad.ptr());
    for (auto item : table["sources"]) {
      auto part = item.cast<py::tuple>();
      op->sources.push_back({Source::Kind(part[0].cast<int>()), part[1].cast<size_t>(), part[2].cast<bool>(),
                             part[3].cast<bool>()});
    }
    op->passed = table["passed"].cast<std::vector<size_t>>();
    op->results = table["results"].cast<std::vector<int64_t>>();
  }
  auto space = op->name.substr(0, op->name.find("::"));
  auto stem = op->name.substr(op->name.find("::") + 2);
  auto* on_device = new torch::Library(
      torch::Library::IMPL, space, cuda ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU, __FILE__, __LINE__);
  on_device->impl(stem.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Device>(op)));
  auto* autograd = new torch::Library(torch::Library::IMPL, space, c10::DispatchKey::Autograd, __FILE__, __LINE__);
  autograd->impl(stem.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Autograd>(op)));
  libraries.insert(libraries.end(), {on_device, autograd});
  py::capsule capsule(op, "cute_ops_torch.Op");
  return py::make_tuple(
      capsule, py::reinterpret_steal<py::object>(PyCFunction_New(&methods[0], capsule.ptr())),
      py::reinterpret_steal<py::object>(PyCFunction_New(&methods[1], capsule.ptr())));
}

}  // namespace

PYBIND11_MODULE(_cute_ops_torch, m) {
  m.def("define", &define);
  m.def("remembered", [](const py::capsule& op) { return self(op.ptr()).count; });
  m.def("forget", [](const py::capsule& op) {
    std::unique_lock lock(self(op.ptr()).mutex);
    forget(self(op.ptr()));
  });
}
