module @jit_packs attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["d"=8]> {stablehlo.mesh = {axes = [{name = "d", size = 8 : i64}]}}
  sdy.mesh @mesh_0 = <["d"=8]> {stablehlo.mesh = {axes = [{name = "d", size = 8 : i64}]}}
  func.func public @main(%arg0: tensor<8x200xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"d"}, {}]>}, %arg1: tensor<8x200xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"d"}, {}]>}, %arg2: tensor<8x200xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"d"}, {}]>}, %arg3: tensor<8x7xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"d"}, {}]>}) -> (tensor<1x200xf32> {jax.result_info = "result[0]"}, tensor<1x200xf32> {jax.result_info = "result[1]"}, tensor<1x200xf32> {jax.result_info = "result[2]"}, tensor<1x7xf32> {jax.result_info = "result[3]"}) {
    %0:4 = sdy.manual_computation(%arg0, %arg1, %arg2, %arg3) in_shardings=[<@mesh, [{"d"}, {}]>, <@mesh, [{"d"}, {}]>, <@mesh, [{"d"}, {}]>, <@mesh, [{"d"}, {}]>] out_shardings=[<@mesh, [{}, {}]>, <@mesh, [{}, {}]>, <@mesh, [{}, {}]>, <@mesh, [{}, {}]>] manual_axes={"d"} (%arg4: tensor<1x200xf32>, %arg5: tensor<1x200xf32>, %arg6: tensor<1x200xf32>, %arg7: tensor<1x7xf32>) {
      %1 = stablehlo.reshape %arg6 : (tensor<1x200xf32>) -> tensor<200xf32>
      %2 = stablehlo.reshape %arg7 : (tensor<1x7xf32>) -> tensor<7xf32>
      %3 = stablehlo.concatenate %1, %2, dim = 0 : (tensor<200xf32>, tensor<7xf32>) -> tensor<207xf32>
      %4 = "stablehlo.all_reduce"(%arg4) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh_0, axes = [#stablehlo.axis_ref<name = "d">]>, use_global_device_ids}> ({
      ^bb0(%arg8: tensor<f32>, %arg9: tensor<f32>):
        %11 = stablehlo.add %arg8, %arg9 : tensor<f32>
        stablehlo.return %11 : tensor<f32>
      }) : (tensor<1x200xf32>) -> tensor<1x200xf32>
      %5 = "stablehlo.all_reduce"(%arg5) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh_0, axes = [#stablehlo.axis_ref<name = "d">]>, use_global_device_ids}> ({
      ^bb0(%arg8: tensor<f32>, %arg9: tensor<f32>):
        %11 = stablehlo.add %arg8, %arg9 : tensor<f32>
        stablehlo.return %11 : tensor<f32>
      }) : (tensor<1x200xf32>) -> tensor<1x200xf32>
      %6 = "stablehlo.all_reduce"(%3) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh_0, axes = [#stablehlo.axis_ref<name = "d">]>, use_global_device_ids}> ({
      ^bb0(%arg8: tensor<f32>, %arg9: tensor<f32>):
        %11 = stablehlo.add %arg8, %arg9 : tensor<f32>
        stablehlo.return %11 : tensor<f32>
      }) : (tensor<207xf32>) -> tensor<207xf32>
      %7 = stablehlo.slice %6 [0:200] : (tensor<207xf32>) -> tensor<200xf32>
      %8 = stablehlo.slice %6 [200:207] : (tensor<207xf32>) -> tensor<7xf32>
      %9 = stablehlo.reshape %7 : (tensor<200xf32>) -> tensor<1x200xf32>
      %10 = stablehlo.reshape %8 : (tensor<7xf32>) -> tensor<1x7xf32>
      sdy.return %4, %5, %9, %10 : tensor<1x200xf32>, tensor<1x200xf32>, tensor<1x200xf32>, tensor<1x7xf32>
    } : (tensor<8x200xf32>, tensor<8x200xf32>, tensor<8x200xf32>, tensor<8x7xf32>) -> (tensor<1x200xf32>, tensor<1x200xf32>, tensor<1x200xf32>, tensor<1x7xf32>)
    return %0#0, %0#1, %0#2, %0#3 : tensor<1x200xf32>, tensor<1x200xf32>, tensor<1x200xf32>, tensor<1x7xf32>
  }
}
