# The GPU part: a module that moesim-capture opens at run time, so that programs start without toolkit or
# driver.
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(FATAL_ERROR "MOESIM_CUDA: no nvcc found; put it into PATH or set CMAKE_CUDA_COMPILER")
endif()
if(NOT CMAKE_CUDA_ARCHITECTURES) # `native` needs a GPU; V100 (70) needs a toolkit before 13
  execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --list-gpu-arch OUTPUT_VARIABLE offered)
  foreach(arch 75 80 86 89 90 100 120)
    if(offered MATCHES "compute_${arch}(\n|$)")
      list(APPEND CMAKE_CUDA_ARCHITECTURES ${arch}-real)
    endif()
  endforeach()
  if(offered MATCHES "compute_70(\n|$)")
    list(PREPEND CMAKE_CUDA_ARCHITECTURES 70-real)
  endif()
  list(GET CMAKE_CUDA_ARCHITECTURES -1 newest) # what comes later compiles its own from this
  string(REPLACE real virtual newest ${newest})
  list(APPEND CMAKE_CUDA_ARCHITECTURES ${newest})
endif()
set(CMAKE_CUDA_STANDARD 17)
enable_language(CUDA)
find_package(CUDAToolkit 12.0 REQUIRED)
find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS} REQUIRED)
find_library(NCCL_LIBRARY nccl HINTS ${CUDAToolkit_LIBRARY_DIR} REQUIRED)

# What moesim-capture does not use itself is part of the module.
file(GLOB CUDA_SOURCES CONFIGURE_DEPENDS runtime/cuda/*.c runtime/job.c runtime/peers.c runtime/tcp_*.c)
file(GLOB CUDA_KERNELS CONFIGURE_DEPENDS kernels/*.cu)
add_library(moesim_kernels_cuda STATIC ${CUDA_KERNELS})
target_include_directories(moesim_kernels_cuda PRIVATE ${CMAKE_SOURCE_DIR})
set_target_properties(moesim_kernels_cuda PROPERTIES POSITION_INDEPENDENT_CODE ON)
# Repeatable arithmetic, as on the host: products are rounded before they are added. Not compressed, so that a
# test can list what is there.
target_compile_options(moesim_kernels_cuda PRIVATE
  $<$<COMPILE_LANGUAGE:CUDA>:-fmad=false --no-compress -Werror=all-warnings -Xcompiler=-Wall>)
add_library(moesim_cuda MODULE ${CUDA_SOURCES})
target_include_directories(moesim_cuda PRIVATE ${NCCL_INCLUDE_DIR})
if(EXISTS ${CMAKE_SOURCE_DIR}/runtime/cuda/comm_nccl.c)
  target_compile_definitions(moesim_cuda PRIVATE MOESIM_NCCL)
endif()
target_link_libraries(moesim_cuda PRIVATE moesim_flags moesim_kernels_cuda CUDA::cudart CUDA::cublas
  ${NCCL_LIBRARY} Threads::Threads)
set_target_properties(moesim_cuda PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})
message(STATUS "moesim: GPU part for ${CMAKE_CUDA_ARCHITECTURES}, CUDA ${CUDAToolkit_VERSION}")
