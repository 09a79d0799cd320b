# As much of pybind11 as this project's build asks for, over the headers that torch brings along: for machines that have torch
# and no pybind11. `cmake -Dpybind11_DIR=scripts/pybind11 -DTORCH_INCLUDE=.../torch/include`.
if(NOT EXISTS "${TORCH_INCLUDE}/pybind11/pybind11.h")
  message(FATAL_ERROR "there are no headers of pybind11 in TORCH_INCLUDE, ${TORCH_INCLUDE}")
endif()

function(pybind11_add_module name)
  Python_add_library(${name} MODULE WITH_SOABI ${ARGN})
  target_include_directories(${name} SYSTEM PRIVATE "${TORCH_INCLUDE}")
endfunction()
