# Included by tests/CMakeLists.txt after doubles/nccl.cmake: the communicator "nccl" on the doubles of the
# CUDA runtime and NCCL, 4 ranks that meet through MPI, or (env) where the variables of torchrun say.
if(TARGET moesim_doubles_nccl)
  add_executable(test_comm_nccl cuda/mpi/test_comm_nccl.c cuda/mpi/test_comm_nccl_ends.c
    ${CMAKE_SOURCE_DIR}/runtime/cuda/comm_nccl.c)
  target_link_libraries(test_comm_nccl PRIVATE moesim_doubles_nccl moesim_kernels_on_host moesim_runtime
    ${OPENBLAS_LIBRARY} Threads::Threads m)
  foreach(meet mpi env)
    foreach(seed 1 2)
      add_test(NAME comm_nccl_${meet}_${seed}
        COMMAND ${MPIEXEC_EXECUTABLE} -n 4 $<TARGET_FILE:test_comm_nccl> ${meet} all)
      set_tests_properties(comm_nccl_${meet}_${seed} PROPERTIES LABELS "cuda;mpi" PROCESSORS 2
        ENVIRONMENT MOE_DOUBLE_SEED=${seed})
    endforeach()
    foreach(end stop absent late_split late_open remote error)
      add_test(NAME comm_nccl_${meet}_${end}
        COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/cuda/mpi/ends.sh 3 4
          ${MPIEXEC_EXECUTABLE} -n 4 $<TARGET_FILE:test_comm_nccl> ${meet} ${end})
      set_tests_properties(comm_nccl_${meet}_${end} PROPERTIES LABELS "cuda;mpi" PROCESSORS 2)
    endforeach()
    set_property(TEST comm_nccl_${meet}_remote APPEND PROPERTY ENVIRONMENT MOE_DOUBLE_NCCL=remote:2:1)
    set_property(TEST comm_nccl_${meet}_error APPEND PROPERTY ENVIRONMENT MOE_DOUBLE_NCCL=error:2:1)
  endforeach()
endif()

# The GPU part as moesim-capture opens it, with doubles in place of the libraries: whole training steps.
if(TARGET moesim_doubles_nccl)
  file(GLOB module_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/runtime/cuda/*.c
    ${CMAKE_SOURCE_DIR}/runtime/job.c ${CMAKE_SOURCE_DIR}/runtime/peers.c ${CMAKE_SOURCE_DIR}/runtime/tcp_*.c)
  add_library(moesim_cuda_double MODULE ${module_sources})
  set_target_properties(moesim_cuda_double PROPERTIES LINKER_LANGUAGE CXX)
  target_compile_definitions(moesim_cuda_double PRIVATE MOESIM_NCCL)
  target_link_libraries(moesim_cuda_double PRIVATE moesim_flags moesim_doubles_nccl moesim_kernels_on_host
    ${OPENBLAS_LIBRARY} Threads::Threads m)
  if(MOESIM_SANITIZE) # what one step does to memory, the next does
    set(steps 1)
  endif()
  add_test(NAME cuda_steps COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/cli/test_cuda_steps.sh $<TARGET_FILE:moesim>
    $<TARGET_FILE:moesim_cuda_double> ${steps})
  add_test(NAME cuda_faults COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/cli/test_cuda_faults.sh $<TARGET_FILE:moesim>
    $<TARGET_FILE:moesim_cuda_double>)
  set_tests_properties(cuda_steps cuda_faults PROPERTIES LABELS "cuda;mpi" PROCESSORS 2)
  # What a grouped product costs is a GPU's to say; here, that it runs.
  add_executable(bench_cuda_gemm bench/cuda_gemm.c)
  target_link_libraries(bench_cuda_gemm PRIVATE moesim_runtime)
  set_target_properties(bench_cuda_gemm PROPERTIES ENABLE_EXPORTS ON)
  target_link_options(bench_cuda_gemm PRIVATE -Wl,--whole-archive $<TARGET_FILE:moesim_runtime>
    -Wl,--no-whole-archive)
  add_test(NAME bench_cuda_gemm COMMAND bench_cuda_gemm --rows 64 --hidden 32 --ffn 16 --experts 8 --runs 3)
  set_tests_properties(bench_cuda_gemm PROPERTIES LABELS cuda
    ENVIRONMENT MOESIM_GPU_MODULE=$<TARGET_FILE:moesim_cuda_double>)
endif()
