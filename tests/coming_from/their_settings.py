"""What users of the four systems could set for training, and tests elsewhere that show our side of it."""

from __future__ import annotations

# Everything that the four systems let their users set for training.
THEIRS = {
    "deeprec": """
        --data_location --output_dir --checkpoint --seed --steps --batch_size --save_steps --keep_checkpoint_max
        --no_eval --deep_dropout --bf16 --tf --emb_fusion --op_fusion --smartstaged --optimizer --learning_rate
        --micro_batch --ev --ev_filter --ev_elimination --adaptive_emb --dynamic_ev --incremental_ckpt --workqueue
        --parquet_dataset --parquet_dataset_shuffle --group_embedding --protocol --inter --intra
        --input_layer_partitioner --dense_layer_partitioner --timeline --interaction_op
        START_STATISTIC_STEP STOP_STATISTIC_STEP MALLOC_CONF LD_PRELOAD TF_CONFIG MEM_USAGE_STRATEGY
        adam adamasync adagraddecay adagrad gradientdescent AdamWOptimizer
        get_embedding_variable categorical_column_with_embedding categorical_column_with_hash_bucket embedding_dim
        initializer default_value_dim default_value_no_permission CounterFilter(filter_freq) CBFFilter
        GlobalStepEvict(steps_to_live) L2WeightEvict(l2_weight_threshold) StorageOption get_multihash_variable
        total_count CheckpointOption TF_EV_SAVE_FILTERED_FEATURES
        save_checkpoint_secs save_incremental_checkpoint_secs incremental_save_restore SessionGroup
        Processor
    """,
    "e2eaiok": """
        RUN_MODE=kaggle RUN_MODE=criteo_small RUN_MODE=criteo_full run_aiokray_dlrm.sh run_data_check.sh
        run_prepare_env.sh run_data_process.sh convert_to_parquet.py preprocessing.py run_train.sh run_inference.sh
        DATASET_DIR OUTPUT_DIR APP_DIR http_proxy https_proxy no_proxy OMP_NUM_THREADS KMP_BLOCKTIME KMP_AFFINITY
        train_days train_input_folder test_input_folder output_folder spark_config
        arch_sparse_feature_size arch_dense_feature_size arch_embedding_size arch_mlp_bot arch_mlp_top
        arch_interaction_op arch_interaction_itself md_flag md_threshold md_temperature md_round_dims qr_flag
        qr_threshold qr_operation qr_collisions activation_function loss_function loss_weights loss_threshold
        round_targets max_ind_range sparse_dense_boundary
        mini_batch_size nepochs optimizer learning_rate lamblr lr_num_warmup_steps lr_decay_start_step
        lr_num_decay_steps bf16 use_ipex use_gpu test_freq test_mini_batch_size test_num_workers mlperf_auc_threshold
        mlperf_acc_threshold numpy_rand_seed num_batches sync_dense_params dist_backend num_workers
        data_generation data_set data_size num_indices_per_lookup num_indices_per_lookup_fixed data_trace_file
        data_trace_enable_padding raw_data_file processed_data_file train_data_path eval_data_path day_feature_count
        memory_map mlperf_bin_loader mlperf_bin_shuffle data_randomize data_sub_sample_rate print_freq print_time
        print_precision debug_mode plot_compute_graph enable_profiling profiling_start_iter profiling_num_iters out_dir
        save_model load_model inference_only save_onnx mlperf_logging best_auc.txt
        --distributed --nproc_per_node --nnodes --world_size --hostfile --master_addr --master_port --mpi_type --timeout
        --job_name --ncpu_per_proc --ccl_worker_count --ninstances --ncore_per_instance --socket_id --core_list
        --enable_tcmalloc --enable_jemalloc --use_default_allocator --enable_iomp --config-path --save-path
    """,
    "ray-notebook": """
        num_workers train_batch_size validation_batch_size limit_training_rows limit_validation_rows
        read_from_cached_parquet num_epochs skip_train_step train_day_list validate_every_n_steps skip_validation_step
        skip_validation_at_epoch_end log_metrics_every_n_steps train_step_limit embedding_dim
        num_embeddings_per_feature dense_arch_layer_sizes over_arch_layer_sizes interaction_type dcn_num_layers
        dcn_low_rank_dim learning_rate optimizer_eps seed start_from_checkpoint_path save_checkpoint_every_n_epochs
        save_checkpoint_every_n_mins save_checkpoint_at_end checkpoint_dir
        ScalingConfig FailureConfig(max_failures) CheckpointConfig(num_to_keep) RunConfig(storage_path)
        KINETO_USE_DAEMON KINETO_DAEMON_INIT_DELAY_S RAY_TRAIN_V2_ENABLED ray.train.report iteration_blocked_time
        get_ray_dataset read_csv(shuffle) fill_missing concat_and_normalize_dense_features map_features_to_indices
        read_feature_mapping_table convert_to_torchrec_batch_format TRAIN_DATASET_PATH VAL_DATASET_PATH
    """,
    "intel-wide-deep": """
        fp32_training.sh launch_benchmark.py fp32_training_demo.sh fp32_training_check_accuracy.sh
        run_tf_serving_client.py
        DATASET_DIR OUTPUT_DIR CHECKPOINT_DIR STEPS TARGET_ACCURACY RETRY_LIMIT MODEL_NAME MODEL_SCRIPT REGISTRY
        IMAGE_VERSION IMAGE_SUFFIX USER_ID USER_NAME GROUP_ID GROUP_NAME FS_ID NFS_PATH NFS_SERVER PVC_NAME PVC_PATH
        REPLICAS TF_SERVING_PORT
        WIDE_AND_DEEP DEEP WIDE hash_bucket_size embedding_column(dimension) normalizer_fn dnn_hidden_units dnn_dropout
        linear_feature_columns linear_optimizer dnn_optimizer batch_size save_checkpoints_steps shuffle
        num_parallel_calls inter_op_parallelism_threads intra_op_parallelism_threads
    """,
}

_OPTIMIZERS = "learner/test_optimizers.py"
_TABLE = "embeddings/test_table.py"
_TRAINING = "train/test_training.py"
_CHECKPOINT = "test_checkpoint.py"
_DAMAGED = f"{_CHECKPOINT}::test_a_flipped_byte_in_any_file_is_noticed_and_the_checkpoint_before_is_used"

# A part of a row, or their name of a row, -> the test that shows what the page says about it.
SHOWN_BY = {
    "ranking.train.seed": f"{_TRAINING}::test_one_thread_gives_the_same_bits_twice",
    "ranking.train.max_steps": f"{_TRAINING}::test_training_stops_after_so_many_steps_or_minutes",
    "ranking.train.micro_batches": f"{_TRAINING}::test_micro_batches_change_nothing_but_rounding",
    "ranking.train.target": f"{_TRAINING}::test_training_stops_at_its_target",
    "ranking.train.schedule.warmup": f"{_OPTIMIZERS}::test_warm_up_hold_and_quadratic_decay",
    "ranking.train.schedule.decay_from": f"{_OPTIMIZERS}::test_warm_up_hold_and_quadratic_decay",
    "ranking.train.schedule.decay": f"{_OPTIMIZERS}::test_warm_up_hold_and_quadratic_decay",
    "ranking.train.schedule.power": f"{_OPTIMIZERS}::test_warm_up_hold_and_quadratic_decay",
    "rows": "features/test_row_operations.py::test_a_sample_keeps_the_same_rows_in_any_cutting",
    "check --data": "test_cli.py::test_check_looks_at_the_files",
    "generate --rows": "test_cli.py::test_generate_speaks_json",
    "prepare --data": "test_cli.py::test_prepare_says_what_was_read_and_written",
    "prepare --into": "test_cli.py::test_prepare_says_what_was_read_and_written",
    "prepare --explain": "test_cli.py::test_explain_shows_a_line_for_each_feature",
    "prepare --binary": "prepare/test_prepare_rows.py::test_binary_rows_are_160_bytes_of_label_counts_and_ids",
    "prepare --memory": "prepare/test_prepare_digest.py::test_counting_on_disk_equals_counting_in_memory",
    "prepare --workers": "prepare/test_prepare_digest.py::test_partitions_do_not_change_the_digest",
    "--emb_fusion": "embeddings/test_collection.py::test_a_collection_equals_its_tables_one_by_one",
    "--group_embedding": "embeddings/test_collection.py::test_a_collection_equals_its_tables_one_by_one",
    "--adaptive_emb": f"{_TABLE}::test_a_waiting_key_trains_a_shared_row_and_starts_from_it",
    "adam": f"{_TABLE}::test_adam_counts_the_steps_of_the_row_not_of_the_run",
    "adagraddecay": f"{_TABLE}::test_adagrad_decay_applies_every_missed_period_down_to_the_floor",
    "initializer": f"{_TABLE}::test_rows_depend_on_seed_and_key_not_on_arrival",
    "default_value_no_permission": f"{_TABLE}::test_a_key_is_admitted_at_its_nth_sighting_and_reads_zeros_before",
    "CounterFilter(filter_freq)": f"{_TABLE}::test_reading_does_not_count_towards_admission",
    "CBFFilter": f"{_TABLE}::test_bloom_admission_is_never_late_and_rarely_early",
    "L2WeightEvict(l2_weight_threshold)": f"{_TABLE}::test_eviction_by_norm_compares_the_norm_itself",
    "StorageOption": "embeddings/test_disk.py::test_memory_stays_below_the_bound_and_answers_are_the_same",
    "CheckpointOption": f"{_CHECKPOINT}::test_a_plain_script_reads_it",
    "TF_EV_SAVE_FILTERED_FEATURES": f"{_CHECKPOINT}::test_a_full_checkpoint_and_five_deltas_restore_the_live_tables",
    "save_checkpoint_secs": f"{_TABLE}::test_a_snapshot_holds_its_moment_while_training_goes_on",
    "save_incremental_checkpoint_secs": f"{_TABLE}::test_a_delta_holds_only_what_changed",
    "incremental_save_restore": _DAMAGED,
    "num_embeddings_per_feature": f"{_TABLE}::test_a_key_out_of_range_is_an_error_that_names_it",
    "start_from_checkpoint_path": "train/test_resume.py::test_a_run_killed_ten_times_gives_the_same_bits",
    "get_ray_dataset": "test_log_batches.py::test_criteo_rows_equal_those_of_the_table",
    "ray.train.report": "test_tracking.py::test_tensorboard_reads_back_what_was_logged",
    "arch_interaction_itself": "models/test_models.py::test_dot_interaction_is_the_strict_lower_triangle",
    "mlperf_logging": "test_tracking.py::test_mllog_uses_the_names_of_mlperf",
}
