// Runs a package of AOTInductor from C++: `run model.pt2 inputs.pt outputs.pt`.
//
// inputs.pt holds a list of calls, each a list of tensors; outputs.pt becomes the like. Kernels are planned by Python,
// so an interpreter lives in this process.

#include <ATen/core/ivalue.h>
#include <Python.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <vector>

// As in torch/csrc/jit/serialization/pickle.h, which takes twice as long to compile as all the rest.
namespace torch::jit {
TORCH_API std::vector<char> pickle_save(const c10::IValue& ivalue);
TORCH_API c10::IValue pickle_load(const std::vector<char>& data);
}  // namespace torch::jit

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: %s model.pt2 inputs.pt outputs.pt\n", argv[0]);
    return 2;
  }
  Py_Initialize();
  if (PyRun_SimpleString("import cute_ops_torch.composite.loaded")) return 1;  // registers the ops
  PyEval_SaveThread();
  std::ifstream file(argv[2], std::ios::binary);
  std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  c10::List<c10::List<at::Tensor>> results;
  torch::inductor::AOTIModelPackageLoader model(argv[1]);
  c10::IValue calls = torch::jit::pickle_load(bytes);
  for (const c10::IValue& call : calls.toListRef()) {
    std::vector<at::Tensor> inputs;
    for (const c10::IValue& tensor : call.toListRef()) inputs.push_back(tensor.toTensor());
    results.push_back(c10::List<at::Tensor>(model.run(inputs)));
  }
  auto pickled = torch::jit::pickle_save(results);
  std::ofstream(argv[3], std::ios::binary).write(pickled.data(), std::streamsize(pickled.size()));
}
