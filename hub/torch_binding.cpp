// torch_binding.cpp - Lets Python import the library of a Hugging Face kernel. The module is empty, because loading the
// library registers the ops.
#include <Python.h>

#define SCE_MODULE_INIT_OF(name) PyInit_##name
#define SCE_MODULE_INIT(name) SCE_MODULE_INIT_OF(name)
#define SCE_TEXT_OF(name) #name
#define SCE_TEXT(name) SCE_TEXT_OF(name)

PyMODINIT_FUNC SCE_MODULE_INIT(TORCH_EXTENSION_NAME)() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, SCE_TEXT(TORCH_EXTENSION_NAME), nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
